//! Results on standard output.

use std::io::{ErrorKind, Result as IoResult, StdoutLock, Write};

use outrider::{Error, Result};

/// Writes results. A reader that has gone away, as with `| head`, is no failure; a full disk is.
pub fn results(write: impl FnOnce(&mut StdoutLock<'_>) -> IoResult<()>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match write(&mut out).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Error::io("standard output")(e)),
        _ => Ok(()),
    }
}
