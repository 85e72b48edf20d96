//! Time and timers, natively and in a browser.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_channel::oneshot;

/// Seconds since some moment.
pub fn now() -> f64 {
    platform::now()
}

/// Completes once [`now`] has reached a time. Natively within a few microseconds of it; in a browser by its timers, which
/// are milliseconds late.
pub fn sleep_until(time: f64) -> Sleep {
    Sleep(platform::at(time))
}

pub struct Sleep(oneshot::Receiver<()>);

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<()> {
        // A timer that is gone has nothing left to wait for.
        Pin::new(&mut self.0).poll(context).map(|_| ())
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod platform {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;
    use std::sync::LazyLock;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
    use std::time::{Duration, Instant};

    use futures_channel::oneshot;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    static TIMER: LazyLock<Sender<Alarm>> = LazyLock::new(|| {
        let (sender, receiver) = channel();
        let timer = std::thread::Builder::new().name("timer".to_owned()).spawn(move || run(&receiver));
        // Without the thread its alarms are dropped, which ends every wait at once.
        drop(timer);
        sender
    });

    /// What the system may wake a sleeping thread late by; the rest is waited for without sleeping.
    const COARSE: Duration = Duration::from_micros(120);

    struct Alarm {
        time: Duration,
        done: oneshot::Sender<()>,
    }

    impl PartialEq for Alarm {
        fn eq(&self, other: &Alarm) -> bool {
            self.time == other.time
        }
    }

    impl Eq for Alarm {}

    impl PartialOrd for Alarm {
        fn partial_cmp(&self, other: &Alarm) -> Option<std::cmp::Ordering> {
            Some(self.cmp(other))
        }
    }

    impl Ord for Alarm {
        fn cmp(&self, other: &Alarm) -> std::cmp::Ordering {
            self.time.cmp(&other.time)
        }
    }

    pub fn now() -> f64 {
        START.elapsed().as_secs_f64()
    }

    pub fn at(time: f64) -> oneshot::Receiver<()> {
        let (done, receiver) = oneshot::channel();
        let time = Duration::try_from_secs_f64(time).unwrap_or(if time > 0.0 { Duration::MAX } else { Duration::ZERO });
        if time <= START.elapsed() {
            let _ = done.send(());
        } else {
            let _ = TIMER.send(Alarm { time, done });
        }
        receiver
    }

    fn run(alarms: &Receiver<Alarm>) {
        let mut waiting: BinaryHeap<Reverse<Alarm>> = BinaryHeap::new();
        loop {
            while waiting.peek().is_some_and(|next| next.0.time <= START.elapsed()) {
                let next = waiting.pop().expect("it was there");
                let _ = next.0.done.send(());
            }
            let received = match waiting.peek() {
                None => alarms.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(next) => match next.0.time.saturating_sub(START.elapsed()) {
                    near if near <= COARSE => {
                        std::hint::spin_loop();
                        alarms.try_recv().map_err(|_| RecvTimeoutError::Timeout)
                    }
                    far => alarms.recv_timeout(far - COARSE),
                },
            };
            match received {
                Ok(alarm) => waiting.push(Reverse(alarm)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

#[cfg(target_arch = "wasm32")]
mod platform {
    use std::cell::RefCell;

    use futures_channel::oneshot;
    use wasm_bindgen::prelude::*;

    #[wasm_bindgen]
    extern "C" {
        #[wasm_bindgen(js_namespace = performance, js_name = now)]
        fn milliseconds() -> f64;
        #[wasm_bindgen(js_name = setTimeout)]
        fn set_timeout(callback: &JsValue, milliseconds: f64) -> JsValue;
    }

    pub fn now() -> f64 {
        milliseconds() / 1000.0
    }

    pub fn at(time: f64) -> oneshot::Receiver<()> {
        let (done, receiver) = oneshot::channel();
        let done = RefCell::new(Some(done));
        let ring = Closure::once_into_js(move || done.take().map(|done| done.send(())).is_some());
        set_timeout(&ring, ((time - now()) * 1000.0).max(0.0));
        receiver
    }
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;

    #[test]
    fn alarms_ring_in_order_and_not_early() {
        let start = now();
        let order = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let wait = |delay: f64| {
            let order = order.clone();
            async move {
                sleep_until(start + delay).await;
                assert!(now() >= start + delay);
                order.borrow_mut().push((delay * 1e4) as u32);
            }
        };
        pollster::block_on(futures_util::future::join3(wait(0.02), wait(0.0001), wait(0.005)));
        assert_eq!(*order.borrow(), [1, 50, 200]);
        pollster::block_on(sleep_until(-1.0));
    }
}
