//! Models by their paths and addresses.

use std::path::Path;
use std::rc::Rc;

use super::{Checkpoint, Gguf, PackOptions, Precision, Weights, pack_checkpoint};
use crate::error::{Error, Result, Size};
use crate::flash::{FileFlash, Flash, HttpFlash};
use crate::pack::{MANIFEST, MemorySink, Pack};

/// Bytes that a checkpoint's weights take at most, without loss, if it is packed in memory when it is opened as it is.
const MAX_IN_MEMORY: u64 = 8 << 30;

/// Opens a checkpoint wherever it is: a directory with `config.json` and safetensors, or the path or http(s) address of a
/// GGUF file, the first one of a split model.
///
/// # Errors
/// [`Error::Request`] for what is neither, and those of [`Checkpoint::open`] and [`Gguf::open`].
pub async fn open_checkpoint(location: &str) -> Result<Box<dyn Weights>> {
    if is_gguf(location) {
        return Ok(Box::new(open_gguf(location).await?));
    }
    Ok(Box::new(Checkpoint::open(Path::new(location))?))
}

/// Whether a path or an address is that of a GGUF file.
pub fn is_gguf(location: &str) -> bool {
    let path = if is_address(location) { location.split(['?', '#']).next().unwrap_or_default() } else { location };
    path.to_ascii_lowercase().ends_with(".gguf")
}

/// Opens a GGUF file by its path or its http(s) address.
pub async fn open_gguf(location: &str) -> Result<Gguf> {
    let (flash, file): (Rc<dyn Flash>, String) = if is_address(location) {
        let location = location.split('#').next().unwrap_or_default();
        let (path, query) = location.find('?').map_or((location, ""), |at| location.split_at(at));
        let (dir, file) = path.rsplit_once('/').unwrap_or(("", path));
        (Rc::new(HttpFlash::new(&format!("{dir}/{query}"))), file.to_owned())
    } else {
        let path = Path::new(location);
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        (Rc::new(FileFlash::open(dir)?), file)
    };
    Gguf::open(flash, &file).await
}

fn is_address(location: &str) -> bool {
    location.starts_with("http://") || location.starts_with("https://")
}

/// Opens a model wherever it is: a pack's directory, a checkpoint, which is packed in memory without loss (see
/// [`open_checkpoint`]), or the http(s) address of a pack.
///
/// # Errors
/// [`Error::Request`] for a directory that is neither, or a checkpoint too large for memory; those of [`Pack::open`] and
/// [`pack_checkpoint`].
pub async fn open_model(location: &str) -> Result<Pack> {
    if !is_gguf(location) {
        if is_address(location) {
            return Pack::open(Rc::new(HttpFlash::new(location))).await;
        }
        let dir = Path::new(location);
        let flash = FileFlash::open(dir)?;
        if dir.join(MANIFEST).exists() {
            return Pack::open(Rc::new(flash)).await;
        }
        if !dir.join("config.json").exists() {
            return Err(Error::Request(format!(
                "`{location}` holds neither a pack ({MANIFEST}) nor a checkpoint (config.json and safetensors)"
            )));
        }
    }
    let checkpoint = open_checkpoint(location).await?;
    let bytes = checkpoint.exact_bytes();
    if bytes > MAX_IN_MEMORY {
        let reason = format!(
            "its weights take {} as they are; pack it first: outrider pack {location} -o PACK --quant q4",
            Size(bytes)
        );
        return Err(Error::Request(reason));
    }
    let options = PackOptions { provenance: false, ..PackOptions::new(Precision::Lossless) };
    let packed = pack_checkpoint(&*checkpoint, &options, MemorySink::default(), |_, _| ()).await?;
    let flash: Rc<dyn Flash> = Rc::new(packed.pack);
    let pack = Pack::open(flash).await?;
    // Hashed a moment ago, when it was written.
    pack.set_verified();
    Ok(pack)
}
