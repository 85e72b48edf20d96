//! A loaded model, as the engine worker holds it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::ready;
use js_sys::{Function, Promise};
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

use super::errors::to_js;
use super::internal::{self, Ask, Internals};
use super::speed::{Speed, now};
use super::{WebInstallation, WebOptions, report};
use crate::chat::Chat;
use crate::chat::openai::{ChatRequest, Delta, FinishReason, Head};
use crate::engine::generate::Next;
use crate::engine::sampler::Sampler;
use crate::engine::{Counters, Engine, Options, Pause, Stop, Want};
use crate::error::{Error, Result};
use crate::flash::install::Installed;
use crate::flash::opfs::{Files, OpfsFlash};
use crate::flash::{Flash, Throttled};
use crate::les::spans::Timing;
use crate::les::trace::Pass;
use crate::pack::Pack;

type Store = Installed<OpfsFlash>;

/// An engine and how to chat with it. Calls that take time must come one after another; [`abort`](Self::abort) and
/// [`stats`](Self::stats) may come at any time.
#[wasm_bindgen]
pub struct WebEngine {
    /// Absent while a call uses it, and after it was lost and could not be made again.
    engine: RefCell<Option<Engine>>,
    busy: Cell<bool>,
    maker: Maker,
    chat: Chat,
    stop: Stop,
    /// Of reading what an earlier visit used.
    hurry: Stop,
    model: String,
    /// What does not change while there is an engine, as JSON.
    fixed: RefCell<Value>,
    /// What the engine had counted when it was ready for its first request, and by now.
    before: Cell<Counters>,
    counters: Cell<Counters>,
    speed: RefCell<Speed>,
}

#[wasm_bindgen]
impl WebEngine {
    /// Loads an installed pack. Phases reported: `load`, `warmup`. `pause()` is a promise that resolves when waiting
    /// messages have been delivered.
    pub async fn load(
        files: Files,
        installation: &WebInstallation,
        options: String,
        on_progress: Function,
        pause: Function,
    ) -> Result<WebEngine, JsValue> {
        let store = Rc::new(Installed::new(OpfsFlash::new(files), installation.outcome.installation.clone()));
        let result = load(store.clone(), &options, &on_progress, every_so_often(pause)).await;
        heal(&store, result).await.map_err(to_js)
    }

    /// Answers a chat completion request, both as JSON. When it asks for a stream, `on_chunk` gets each chunk as JSON
    /// and the result is empty.
    pub async fn chat(&self, request: String, on_chunk: Function) -> Result<String, JsValue> {
        if self.busy.replace(true) {
            return Err(to_js(Error::Request("another request is being answered".to_owned())));
        }
        self.stop.clear();
        let mut engine = self.engine.take();
        let result = self.answer(&mut engine, &request, &on_chunk).await;
        if let Some(engine) = &engine {
            self.counters.set(engine.counters());
        }
        self.engine.replace(engine);
        self.busy.set(false);
        heal(&self.maker.store, result).await.map_err(to_js)
    }

    /// Makes the request being answered fail with `aborted`.
    pub fn abort(&self) {
        self.stop.stop();
    }

    /// Takes up which experts an earlier visit used, as [`hot`](Self::hot) gave it. Whether they are to be read.
    pub fn remember(&self, hot: &[u8]) -> bool {
        self.engine.borrow_mut().as_mut().is_some_and(|engine| engine.set_hot_list(hot))
    }

    /// Reads what an earlier visit used, until that is done or [`hurry`](Self::hurry) is called: a call like those that
    /// take time.
    pub async fn warm(&self) {
        let Some(mut engine) = self.engine.take() else { return };
        self.busy.set(true);
        // The list is a guess, and reading it may fail: a reply that needs what failed says so.
        let _ = engine.warm(&self.hurry).await;
        self.counters.set(engine.counters());
        self.engine.replace(Some(engine));
        self.busy.set(false);
    }

    /// Ends [`warm`](Self::warm), because there is something to do.
    pub fn hurry(&self) {
        self.hurry.stop();
    }

    /// Which experts are worth reading at the beginning of the next visit.
    pub fn hot(&self) -> Option<Vec<u8>> {
        self.engine.borrow().as_ref().map(Engine::hot_list)
    }

    /// Answers a test or a bench, both as JSON.
    pub async fn internal(&self, ask: String) -> Result<String, JsValue> {
        self.answer_test(&ask).await.map(|answer| answer.to_string()).map_err(to_js)
    }

    /// The package's `Stats`, as JSON.
    pub fn stats(&self) -> String {
        let mut stats = self.fixed.borrow().clone();
        let (before, counters, speed) = (self.before.get(), self.counters.get(), self.speed.borrow());
        stats["speed"] = json!({ "prefill": speed.prefill(), "decode": speed.decode() });
        stats["tokens"] = json!(speed.latest());
        stats["pool"]["hits"] = json!(counters.experts.hits - before.experts.hits);
        stats["pool"]["misses"] = json!(counters.experts.missed() - before.experts.missed());
        stats["pool"]["bytesRead"] = json!(counters.expert_bytes() - before.expert_bytes());
        stats["pool"]["bytesGuessed"] = json!(counters.guess_bytes - before.guess_bytes);
        stats["pool"]["warmed"] = json!(counters.experts.warm_reads);
        stats["pool"]["warmedUsed"] = json!(counters.experts.warm_used);
        stats["memory"]["wasm"] = json!(wasm_bytes());
        stats.to_string()
    }
}

impl WebEngine {
    /// The engine, made anew if the last one was lost and could not be replaced at once.
    async fn present<'e>(&self, held: &'e mut Option<Engine>) -> Result<&'e mut Engine> {
        match held {
            Some(engine) => Ok(engine),
            None => self.again(held, "it could not be set up at once").await,
        }
    }

    /// Makes an engine in the place of one whose GPU was lost. Where there is no GPU any more and the CPU may do, that.
    async fn again<'e>(&self, held: &'e mut Option<Engine>, reason: &str) -> Result<&'e mut Engine> {
        let mut engine = self.maker.make(|_, _| {}).await.map_err(|error| match error {
            Error::NoGpu(why) => Error::DeviceLost(format!("{reason}; it does not come back: {why}")),
            other => other,
        })?;
        engine.set_stop_flag(self.stop.clone());
        let mut fixed = describe(&mut engine).await?;
        if let Some(notices) = fixed["notices"].as_array_mut() {
            notices.push(json!(format!("the GPU was lost ({reason}), and the model was loaded again")));
        }
        self.fixed.replace(fixed);
        self.before.set(engine.counters());
        self.counters.set(engine.counters());
        self.speed.borrow_mut().count_from(engine.counters());
        Ok(held.insert(engine))
    }

    async fn answer_test(&self, ask: &str) -> Result<Value> {
        match serde_json::from_str(ask).map_err(|e| Error::Request(e.to_string()))? {
            Ask::Throttle { throttle } => {
                let unheld = || Error::Request("the engine was not made to be held back".to_owned());
                let flash = self.maker.throttled.as_ref().ok_or_else(unheld)?;
                flash.set(throttle);
                Ok(json!({ "failed": flash.failed() }))
            }
            Ask::Counters {} => {
                let held = self.engine.borrow();
                let counted = held.as_ref().map_or(self.counters.get(), Engine::counters);
                Ok(internal::counters(&counted))
            }
            Ask::Logits { tokens, widths } => {
                if self.busy.replace(true) {
                    return Err(Error::Request("another request is being answered".to_owned()));
                }
                self.stop.clear();
                let mut held = self.engine.take();
                let answer = match self.present(&mut held).await {
                    Ok(engine) => internal::logits(engine, &tokens, &widths).await,
                    Err(error) => Err(error),
                };
                self.engine.replace(held);
                self.busy.set(false);
                answer
            }
        }
    }

    async fn answer(&self, held: &mut Option<Engine>, request: &str, on_chunk: &Function) -> Result<String> {
        let request = ChatRequest::from_json(request)?;
        let mut engine = self.present(held).await?;
        let prompt = self.chat.prompt(&request)?;
        let mut sampler = Sampler::new(self.chat.sampling(&request, (js_sys::Math::random() * 2f64.powi(53)) as u64))?;
        let id = format!("chatcmpl-{:013x}", (js_sys::Math::random() * 2f64.powi(52)) as u64);
        let room = engine.context().saturating_sub(prompt.len());
        let mut reply = self.chat.reply(&request, &id, prompt.len(), room);
        let created = (js_sys::Date::now() / 1000.0) as u64;
        let head = Head { id, created, model: request.model.clone().unwrap_or_else(|| self.model.clone()) };
        let stream = request.stream == Some(true);
        let wants_ids = request.return_token_ids == Some(true);
        // Tokens that no chunk has carried yet: a token may give no text, and text may wait for the next.
        let tokens = RefCell::new(Vec::new());
        let send = |delta: Delta, finish: Option<FinishReason>, timings: Option<Value>| {
            let mut chunk = head.chunk(delta, finish);
            chunk.timings = timings;
            chunk.choices[0].token_ids = wants_ids.then(|| tokens.take());
            self::send(on_chunk, &chunk)
        };

        if request.cache_prompt == Some(false) {
            engine.reset()?;
        }
        self.speed.replace(Speed::start(prompt.len(), engine.counters()));
        if stream {
            send(Delta::start(), None, None)?;
        }
        let mut failed = Ok(());
        // The prompt and what was generated so far: from these a new engine goes on when the GPU is lost.
        let sequence = RefCell::new(prompt);
        let mut lost = false;
        loop {
            let (so_far, generated) = (sequence.borrow().clone(), reply.usage().completion_tokens);
            let ended = engine.generate(&so_far, &mut sampler, room - generated, |engine, token| {
                self.counters.set(engine.counters());
                let pass = self.maker.last_pass.take();
                self.speed.borrow_mut().token(engine.cached(), engine.counters(), pass);
                sequence.borrow_mut().push(token);
                tokens.borrow_mut().push(token);
                failed = reply.push(token).and_then(|delta| match delta.is_empty() {
                    true => Ok(()),
                    false if stream => send(delta, None, None),
                    false => Ok(()),
                });
                match failed.is_err() || reply.finish_reason().is_some() {
                    true => Next::Stop,
                    false => Next::Continue,
                }
            });
            match ended.await {
                Err(Error::DeviceLost(reason)) if !lost => {
                    lost = true;
                    // The memory of the one that is lost is needed for the other.
                    *held = None;
                    engine = self.again(held, &reason).await?;
                }
                ended => {
                    ended?;
                    break;
                }
            }
        }
        failed?;
        let rest = reply.end(FinishReason::Length)?;
        if stream && !rest.is_empty() {
            send(rest, None, None)?;
        }

        let reason = reply.finish_reason().unwrap_or(FinishReason::Length);
        let timings = Some(self.speed.borrow().timings());
        let usage = reply.usage().with_cached(engine.cached());
        if !stream {
            let mut completion = head.completion(reply.message(), reason, usage);
            completion.timings = timings;
            completion.choices[0].token_ids = wants_ids.then(|| tokens.take());
            return to_json(&completion);
        }
        send(Delta::default(), Some(reason), timings)?;
        if request.stream_options.and_then(|o| o.include_usage) == Some(true) {
            self::send(on_chunk, &head.usage_chunk(usage))?;
        }
        Ok(String::new())
    }
}

async fn load(store: Rc<Store>, options: &str, on_progress: &Function, pause: Pause) -> Result<WebEngine> {
    report(on_progress, "load", 0, 0);
    let maker = Maker::new(store, options, pause)?;
    let progress = |done, total| {
        report(on_progress, "load", done, total);
        if done == total {
            report(on_progress, "warmup", 0, 0);
        }
    };
    let mut engine = maker.make(progress).await?;
    let chat = Chat::of_pack(engine.pack()).await?;
    if engine.pack().manifest().self_test.is_none() {
        // Drivers compile kernels when they are first used. Where there is a self-test, that was the first use.
        engine.forward(&[0], Want::Last, None).await?;
        engine.reset()?;
    }
    let (fixed, before) = (describe(&mut engine).await?, engine.counters());
    maker.hold_back();
    Ok(WebEngine {
        fixed: RefCell::new(fixed),
        stop: engine.stop_flag(),
        hurry: Stop::default(),
        model: engine.pack().manifest().name.clone(),
        engine: RefCell::new(Some(engine)),
        busy: Cell::new(false),
        maker,
        chat,
        counters: Cell::new(before),
        before: Cell::new(before),
        speed: RefCell::default(),
    })
}

/// What it takes to make an engine, the first time and after its GPU was lost.
struct Maker {
    store: Rc<Store>,
    options: Options,
    pause: Pause,
    /// Whether the times of passes are recorded, and those of the last one then.
    timeline: bool,
    last_pass: Rc<RefCell<Option<Timing>>>,
    internal: Option<Internals>,
    /// The store, held back, where tests or benches asked for that.
    throttled: Option<Rc<Throttled>>,
}

impl Maker {
    fn new(store: Rc<Store>, options: &str, pause: Pause) -> Result<Maker> {
        let given = WebOptions::parse(options)?;
        let (options, timeline, internal) = (given.engine()?, given.timeline, given.internal);
        let throttled = internal.is_some().then(|| Rc::new(Throttled::new(store.clone())));
        Ok(Maker { store, options, pause, timeline, last_pass: Rc::default(), internal, throttled })
    }

    /// From now on.
    fn hold_back(&self) {
        if let (Some(throttled), Some(internal)) = (&self.throttled, &self.internal) {
            throttled.set(internal.throttle);
        }
    }

    async fn make(&self, on_progress: impl FnMut(u64, u64)) -> Result<Engine> {
        let flash: Rc<dyn Flash> = match &self.throttled {
            Some(throttled) => throttled.clone(),
            None => self.store.clone(),
        };
        let pack = Pack::open(flash).await?;
        let mut engine = Engine::load(pack, &self.options, on_progress).await?;
        if let Some(internal) = &self.internal {
            engine.set_scheduling(engine.scheduling().with(&internal.scheduling)?);
        }
        engine.set_pause(self.pause.clone());
        if self.timeline {
            let last = self.last_pass.clone();
            let keep = move |pass: Pass| {
                last.replace(pass.timing);
                Ok(())
            };
            engine.record_to(0, Box::new(keep));
        }
        Ok(engine)
    }
}

/// How long a call may run before messages are let in, in milliseconds: less than anybody notices, and long against what
/// a pause costs.
const PAUSE_MS: f64 = 12.0;

fn every_so_often(pause: Function) -> Pause {
    let last = Rc::new(Cell::new(now()));
    Rc::new(move || {
        if now() - last.get() < PAUSE_MS {
            return ready(()).boxed_local();
        }
        let (promise, last) = (pause.call0(&JsValue::NULL), last.clone());
        async move {
            if let Ok(promise) = promise {
                // It never rejects, and going on without a pause would do no harm.
                let _ = JsFuture::from(Promise::from(promise)).await;
            }
            last.set(now());
        }
        .boxed_local()
    })
}

/// After an error that says that stored bytes are wrong, lets the next installation check them all.
async fn heal<T>(store: &Store, result: Result<T>) -> Result<T> {
    if let Err(Error::Corrupt { .. } | Error::Truncated { .. } | Error::NotFound { .. }) = &result {
        // If that fails as well, the first error is still the one to report.
        let _ = store.distrust().await;
    }
    result
}

fn send(on_chunk: &Function, chunk: &impl serde::Serialize) -> Result<()> {
    // The callback only posts a message.
    let _ = on_chunk.call1(&JsValue::NULL, &to_json(chunk)?.into());
    Ok(())
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::format("reply", e))
}

async fn describe(engine: &mut Engine) -> Result<Value> {
    let readback = engine.round_trip().await?.map(|seconds| 1000.0 * seconds);
    let (info, ledger) = (engine.backend_info(), engine.ledger());
    let experts: usize = engine.plan().layers.iter().filter_map(|l| l.moe).map(|m| m.experts).sum();
    Ok(json!({
        "backend": { "kind": info.kind, "detail": info.detail, "readback": readback },
        "memory": { "budget": ledger.budget, "total": ledger.total(), "entries": ledger.entries },
        "pool": { "slots": engine.slots(), "experts": experts },
        "context": engine.context(),
        "notices": engine.notices(),
    }))
}

fn wasm_bytes() -> f64 {
    let memory: js_sys::WebAssembly::Memory = wasm_bindgen::memory().unchecked_into();
    let buffer: js_sys::ArrayBuffer = memory.buffer().unchecked_into();
    f64::from(buffer.byte_length())
}
