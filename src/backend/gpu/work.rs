//! The experts' work list, see `shaders/work.wgsl`: items of the same expert are computed in tiles, so that its weights
//! are decoded once for several rows. Which items share a tile changes no result.

use super::program::Program;
use super::tuning::ITEMS_A_TILE;
use crate::backend::WorkItem;

pub struct Work {
    /// What the kernels read.
    pub words: Vec<u32>,
    /// Tiles of each arena.
    pub tiles: Vec<u32>,
}

pub fn list(program: &Program, top_k: usize, items: &[WorkItem]) -> Work {
    let mut items = items.to_vec();
    items.sort_by_key(|i| (i.slot, i.row, i.rank));
    let arenas = program.pool.arenas.len();
    // Tile by tile: arena, byte offset of the slot there, first item, items.
    let mut tiles: Vec<(usize, usize, usize, usize)> = Vec::new();
    let mut first = 0;
    for same in items.chunk_by(|a, b| a.slot == b.slot) {
        let (arena, offset) = program.slot(same[0].slot as usize);
        for tile in same.chunks(ITEMS_A_TILE) {
            tiles.push((arena, offset, first, tile.len()));
            first += tile.len();
        }
    }
    let items_at = 4 * (arenas + tiles.len());
    let mut words = Vec::with_capacity(items_at + items.len());
    let mut counts = Vec::with_capacity(arenas);
    let mut tile = arenas;
    for arena in 0..arenas {
        let count = tiles.iter().filter(|t| t.0 == arena).count();
        words.extend([tile as u32, count as u32, 0, 0]);
        counts.push(count as u32);
        tile += count;
    }
    for (_, offset, first, count) in tiles {
        words.extend([offset as u32 / 16, (items_at + first) as u32, count as u32, 0]);
    }
    words.extend(items.iter().map(|i| i.row * top_k as u32 + i.rank));
    Work { words, tiles: counts }
}
