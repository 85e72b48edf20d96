use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use outrider::chat::Chat;
use outrider::chat::openai::{ChatRequest, FinishReason, Message, Role, Stop};
use outrider::engine::generate::Next;
use outrider::engine::sampler::Sampler;
use outrider::engine::{self, Counters, Engine};
use outrider::error::Size;
use outrider::{Error, Result};

use crate::hot::HotList;
use crate::model::ModelArgs;

/// Talk to a model
///
/// The reply goes to standard output, everything else to standard error. Ctrl-C stops the reply; between replies it ends
/// the program.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// What to say; without it, a conversation, one line at a time: `/retry` asks for the last reply again, `/undo` takes
    /// the last question back, `/clear` starts anew
    prompt: Option<String>,
    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The same seed gives the same reply [default: a new one each time]
    #[arg(long)]
    seed: Option<i64>,
    /// 0 for always the likeliest token, up to 2 [default: what the model suggests]
    #[arg(long)]
    temperature: Option<f32>,
    /// Choose among this many of the likeliest tokens, 0 for all [default: what the model suggests]
    #[arg(long)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that have this probability together [default: what the model suggests]
    #[arg(long)]
    top_p: Option<f32>,
    /// Longest reply [default: what the model suggests]
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
    /// Begin with an empty pool, not with the experts that earlier chats used, and do not keep which ones this one uses
    #[arg(long)]
    cold: bool,
    /// Record what every pass went through, and when, for `outrider trace` and `outrider simulate`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Ends the reply where this text would come; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

pub fn run(args: Args) -> Result<()> {
    pollster::block_on(async {
        let mut request = ChatRequest {
            messages: args.system.iter().map(|text| Message::new(Role::System, text)).collect(),
            seed: args.seed,
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            max_tokens: args.max_tokens,
            stop: (!args.stop.is_empty()).then_some(Stop::Any(args.stop)),
            ..ChatRequest::default()
        };
        let mut engine = args.model.load().await?;
        if let Some(file) = &args.trace {
            record(&mut engine, file)?;
        }
        let chat = Chat::of_pack(engine.pack()).await?;
        let replying = catch_interrupts(&engine)?;
        let hot = if args.cold { HotList::none() } else { HotList::of(args.model.name()) };
        hot.read(&mut engine);
        let mut session = Session { engine, chat, replying, hot };
        let ended = match args.prompt {
            Some(prompt) => {
                request.messages.push(Message::new(Role::User, prompt));
                match session.reply(&request).await? {
                    (_, Ended::Interrupted) => Err(Error::Aborted),
                    _ => Ok(()),
                }
            }
            None => session.converse(request).await,
        };
        session.hot.keep(&session.engine, true);
        ended
    })
}

/// Writes passes to a file as they end, a line each, so that what was recorded is there however the program ends.
fn record(engine: &mut Engine, path: &Path) -> Result<()> {
    let path = path.to_owned();
    let mut file = File::create(&path).map_err(Error::io(path.display()))?;
    let mut write = move |line: serde_json::Result<String>| {
        let line = line.map_err(std::io::Error::from).and_then(|line| file.write_all((line + "\n").as_bytes()));
        line.map_err(Error::io(path.display()))
    };
    write(serde_json::to_string(&engine.header()))?;
    let depth = engine.scheduling().depth;
    engine.record_to(depth, Box::new(move |pass| write(serde_json::to_string(&pass))));
    Ok(())
}

/// From now on Ctrl-C stops the engine while the returned flag is set. Otherwise, or the second time, it ends the
/// program.
fn catch_interrupts(engine: &Engine) -> Result<Arc<AtomicBool>> {
    let replying = Arc::new(AtomicBool::new(false));
    let (stop, flag) = (engine.stop_flag(), replying.clone());
    let caught = ctrlc::set_handler(move || {
        if flag.swap(false, Ordering::SeqCst) {
            stop.stop();
        } else {
            eprintln!();
            std::process::exit(130);
        }
    });
    caught.map_err(|e| Error::Request(format!("Ctrl-C cannot be caught: {e}")))?;
    Ok(replying)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Done,
    Interrupted,
    /// Nobody reads standard output any more.
    Unread,
}

struct Session {
    engine: Engine,
    chat: Chat,
    replying: Arc<AtomicBool>,
    hot: HotList,
}

/// Lines of standard input, read beside whatever else goes on; the first ends what waits for it.
fn lines_of_input(hurry: engine::Stop) -> Receiver<std::io::Result<String>> {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            hurry.stop();
            if sender.send(line).is_err() {
                return;
            }
        }
        hurry.stop();
    });
    receiver
}

impl Session {
    /// A conversation until standard input ends. What fails is reported, and can be tried again.
    async fn converse(&mut self, mut request: ChatRequest) -> Result<()> {
        let terminal = std::io::stdin().is_terminal();
        let hurry = engine::Stop::default();
        let lines = lines_of_input(hurry.clone());
        loop {
            if terminal {
                eprint!("> ");
            }
            // While somebody types. A read that fails now is made again when it is needed, and reported then.
            let _ = self.engine.warm(&hurry).await;
            let Ok(line) = lines.recv() else { break };
            let line = line.map_err(Error::io("standard input"))?;
            let asked = request.messages.iter().rposition(|m| m.role == Role::User);
            match (line.trim(), asked) {
                ("", _) => continue,
                ("/clear", _) => {
                    request.messages.retain(|m| m.role == Role::System);
                    continue;
                }
                ("/undo" | "/retry", None) => {
                    eprintln!("nothing was asked yet");
                    continue;
                }
                ("/undo", Some(asked)) => {
                    request.messages.truncate(asked);
                    continue;
                }
                ("/retry", Some(asked)) => request.messages.truncate(asked + 1),
                _ => request.messages.push(Message::new(Role::User, line)),
            }
            match self.reply(&request).await {
                Ok((_, Ended::Unread)) => break,
                Ok((message, _)) => request.messages.push(message),
                Err(error) if terminal => {
                    eprintln!("error: {error}");
                    request.messages.pop();
                }
                Err(error) => return Err(error),
            }
        }
        if terminal {
            eprintln!();
        }
        Ok(())
    }

    /// Generates a reply onto standard output.
    async fn reply(&mut self, request: &ChatRequest) -> Result<(Message, Ended)> {
        let prompt = self.chat.prompt(request)?;
        let mut sampler = Sampler::new(self.chat.sampling(request, RandomState::new().hash_one(0)))?;
        let room = self.engine.context().saturating_sub(prompt.len());
        let mut reply = self.chat.reply(request, "cli", prompt.len(), room);
        let mut out = std::io::stdout().lock();
        let mut write = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());

        let (started, before) = (Instant::now(), self.engine.counters());
        let (mut first, mut failed, mut unread) = (None, Ok(()), false);
        self.engine.stop_flag().clear();
        self.replying.store(true, Ordering::SeqCst);
        let generated = self
            .engine
            .generate(&prompt, &mut sampler, room, |_, token| {
                first.get_or_insert_with(Instant::now);
                match reply.push(token) {
                    Ok(delta) => unread = write(delta.content.as_deref().unwrap_or_default()).is_err(),
                    Err(e) => failed = Err(e),
                }
                let over = reply.finish_reason().is_some() || failed.is_err() || unread;
                if over { Next::Stop } else { Next::Continue }
            })
            .await;
        self.replying.store(false, Ordering::SeqCst);
        self.hot.keep(&self.engine, false);
        let interrupted = match generated {
            Err(Error::Aborted) => true,
            other => other.map(|_| false)?,
        };
        failed?;
        let rest = reply.end(if interrupted { FinishReason::Stop } else { FinishReason::Length })?;
        unread |= write(rest.content.as_deref().unwrap_or_default()).is_err() || write("\n").is_err();
        let first = first.unwrap_or_else(Instant::now);
        self.report(prompt.len(), reply.usage().completion_tokens, [started, first, Instant::now()], before);
        let ended = match (unread, interrupted) {
            (true, _) => Ended::Unread,
            (false, true) => Ended::Interrupted,
            (false, false) => Ended::Done,
        };
        Ok((reply.message(), ended))
    }

    /// What the reply took. The first token belongs to the prompt.
    fn report(&self, prompt: usize, tokens: usize, [started, first, end]: [Instant; 3], before: Counters) {
        let after = self.engine.counters();
        let (hits, misses) =
            (after.experts.hits - before.experts.hits, after.experts.missed() - before.experts.missed());
        let read = Size(after.expert_bytes() - before.expert_bytes());
        let prefill = (first - started).as_secs_f64();
        let known = match self.engine.cached() {
            0 => String::new(),
            cached => format!(", {cached} of them known,"),
        };
        let speed = match tokens {
            2.. => format!(" at {:.1}/s", (tokens - 1) as f64 / (end - first).as_secs_f64()),
            _ => String::new(),
        };
        eprintln!(
            "[{prompt} tokens{known} read in {prefill:.2} s, {tokens} written{speed}; experts: {hits} hits, {misses} misses, {read} read]"
        );
    }
}
