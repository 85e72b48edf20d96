//! `cargo xtask bench flagship`: what the simulator makes of the flagship on phones, with what that rests on.

use std::path::Path;

use anyhow::Result;

use super::{Options, outrider, record};

const HEADING: &str = "## The flagship on phones, predicted";

pub fn run(root: &Path, options: &Options) -> Result<()> {
    let outrider = outrider(root)?;
    let table = |more: &[&str]| outrider(&[&["simulate", "--flagship", "--table"], more].concat());
    if options.json {
        print!("{}", table(&["--json"])?);
    }
    if options.write || !options.json {
        let tables = table(&[])?;
        if !options.json {
            println!("{}", tables.trim_end());
        }
        if options.write {
            record(root, HEADING, &format!("{INTRODUCTION}{tables}"))?;
        }
    }
    Ok(())
}

const INTRODUCTION: &str = "
Written by `cargo xtask bench flagship --write`, from `outrider simulate --flagship --table`; `--json` prints the same as one
object. Predicted in virtual time by the scheduler that runs in the engine, not measured on a phone. Routing is made up to
published statistics of a model of 40 layers with 256 experts, 8 a token, and 80.7 % of the next layer's foreseen, 3.5 points
less for each further layer; an expert is 1.77 MB, and a budget holds 1.4 GB beside the pool, both at 4.5 bits a weight with a
context of 4096 tokens. A budget below the smallest that works is refused by the engine; its rows are of that smallest. 64
tokens are measured after 128 that fill the pool.

Tokens a second: *on demand* reads every expert when its layer is reached and keeps none; *pool* keeps what it holds;
*overlap* runs what is there while the rest is read; *look-ahead* guesses as well; *layer by layer* is that without submitting
layers before their routing is known; *everything resident* is what no budget here holds; *bound* is the larger of computing
that and reading what a clairvoyant pool of that size would still read. Hits and waits are those of a token with look-ahead:
layers that waited for bytes, results that were waited for, and how long in all.

";
