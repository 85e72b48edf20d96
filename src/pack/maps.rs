//! Maps, by which experts are foreseen better than by routers alone: core tensors in shards of their own, so that a pack
//! gets them, and others later, without what it is being touched.

use std::collections::HashSet;

use super::manifest::{CORE_ALIGN, CORE_EXTENT, CoreTensor, Kind, MANIFEST, Manifest};
use super::writer::Stream;
use super::{Hash, Pack, Sink};
use crate::error::{Error, Result};
use crate::model::{MAPS, map_name};
use crate::tensor::Layout;

/// What takes the place of a layer's router in forecasts from a distance, see
/// [`Layer::fitted`](crate::model::plan::Layer::fitted).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    pub layer: usize,
    pub distance: usize,
    pub layout: Layout,
    /// The matrix in its device layout.
    pub bytes: Vec<u8>,
}

/// What the names of shards that hold maps begin with.
const PREFIX: &str = "maps-";

/// Whether a file is a shard of maps, or one that is being written.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn is_map_file(name: &str) -> bool {
    let name = name.strip_prefix('.').and_then(|name| name.strip_suffix(".partial")).unwrap_or(name);
    name.starts_with(PREFIX) && name.ends_with(".bin")
}

/// Writes shards that hold maps, and returns a pack's manifest with these in the place of any it had. The shards are named
/// by what they hold, so that they take the place of no other.
///
/// # Errors
/// [`Error::Request`] for two maps of one layer and distance, [`Error::Format`] if the result is no valid manifest, and
/// those of the sink.
pub fn put_maps(manifest: &Manifest, maps: &[Map], sink: &mut impl Sink) -> Result<Manifest> {
    let mut manifest = without_maps(manifest);
    let longest = manifest.shards.iter().map(|s| s.bytes).max().unwrap_or(0);
    let max_shard = (longest / CORE_ALIGN * CORE_ALIGN).max(CORE_ALIGN);
    let mut hasher = blake3::Hasher::new();
    for map in maps {
        hasher.update(map_name(map.layer, map.distance).as_bytes()).update(&map.bytes);
    }
    let name = format!("{:?}", Hash(hasher.finalize().into()));
    let mut stream = Stream::new(format!("{PREFIX}{}", &name[..12]));
    for Map { layer, distance, layout, bytes } in maps {
        assert_eq!(bytes.len(), layout.bytes(), "layer {layer}, {distance} ahead: not its device layout");
        let pieces = stream.spread(bytes, max_shard, CORE_EXTENT, &mut manifest, sink)?;
        let shape = vec![layout.rows, layout.cols];
        let tensor = CoreTensor { kind: Kind::Matrix, dtype: layout.dtype, shape, pieces };
        if manifest.core.insert(map_name(*layer, *distance), tensor).is_some() {
            return Err(Error::Request(format!("two maps of layer {layer}, {distance} ahead")));
        }
    }
    stream.cut(&mut manifest);
    manifest.validate()?;
    Ok(manifest)
}

/// Copies a pack with maps in the place of any it has.
pub async fn copy_with_maps<S: Sink>(pack: &Pack, maps: &[Map], mut sink: S) -> Result<(Manifest, S::Pack)> {
    let kept: HashSet<String> = without_maps(pack.manifest()).shards.into_iter().map(|s| s.file).collect();
    let manifest = put_maps(pack.manifest(), maps, &mut sink)?;
    pack.copy_files(&mut sink, |shard| kept.contains(shard)).await?;
    sink.append(MANIFEST, &manifest.to_json())?;
    Ok((manifest, sink.finish()?))
}

/// The manifest without maps and the shards that hold nothing else.
fn without_maps(manifest: &Manifest) -> Manifest {
    let mut manifest = manifest.clone();
    let mut maps = HashSet::new();
    manifest.core.retain(|name, tensor| {
        let map = name.starts_with(MAPS);
        maps.extend(tensor.pieces.iter().map(|p| p.shard).filter(|_| map));
        !map
    });
    let core = manifest.core.values().flat_map(|t| t.pieces.iter().map(|p| p.shard));
    let rows = manifest.embedding.pieces.iter().map(|p| p.shard);
    let experts = manifest.experts.iter().flat_map(|e| e.layers.iter().flatten().flatten());
    let needed: HashSet<usize> = core.chain(rows).chain(experts.map(|i| manifest.extents[*i].shard)).collect();
    let goes = |shard: usize| maps.contains(&shard) && !needed.contains(&shard);

    // Those that stay, by their old number and their new one.
    let renumber = |stays: Vec<bool>| -> Vec<usize> {
        stays.iter().scan(0, |next, stays| Some(std::mem::replace(next, *next + usize::from(*stays)))).collect()
    };
    let shards = renumber((0..manifest.shards.len()).map(|shard| !goes(shard)).collect());
    let extents = renumber(manifest.extents.iter().map(|e| !goes(e.shard)).collect());
    let mut at = 0..;
    manifest.shards.retain(|_| !goes(at.next().expect("it has no end")));
    manifest.extents.retain(|e| !goes(e.shard));
    manifest.extents.iter_mut().for_each(|e| e.shard = shards[e.shard]);
    manifest.core.values_mut().flat_map(|t| &mut t.pieces).for_each(|p| p.shard = shards[p.shard]);
    manifest.embedding.pieces.iter_mut().for_each(|p| p.shard = shards[p.shard]);
    let experts = manifest.experts.iter_mut().flat_map(|e| e.layers.iter_mut().flatten().flatten());
    experts.for_each(|index| *index = extents[*index]);
    manifest
}
