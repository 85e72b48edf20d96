//! How often forecasts were right, as a table.

use std::io::Write;

use outrider::engine::calibrate::Found;
use outrider::les::Recall;

/// A row a layer and one for all of them: the share of the chosen experts that were named. `trained` is the same by maps.
pub fn write(out: &mut impl Write, untrained: &Found, trained: Option<&Found>) -> std::io::Result<()> {
    let depth = untrained.forecasts.iter().map(Vec::len).max().unwrap_or(0);
    write!(out, "| layer | its own router | the token before |")?;
    for distance in 1..=depth {
        let map = if trained.is_some() { " by map |" } else { "" };
        write!(out, " {distance} ahead |{map}")?;
    }
    let columns = depth * if trained.is_some() { 2 } else { 1 };
    writeln!(out, "\n|---|{}", "---:|".repeat(2 + columns))?;
    let at = |found: &Found, layer: usize, distance: usize| found.forecasts[layer].get(distance).copied();
    let layers = untrained.control.len();
    for layers in (0..layers).map(|layer| layer..layer + 1).chain(std::iter::once(0..layers)) {
        let sum = |of: &dyn Fn(usize) -> Option<Recall>| -> Recall { layers.clone().filter_map(of).sum() };
        let name = if layers.len() == 1 { layers.start.to_string() } else { "all".to_owned() };
        let (own, before) = (sum(&|l| Some(untrained.control[l])), sum(&|l| Some(untrained.previous[l])));
        write!(out, "| {name} | {} | {} |", percent(own), percent(before))?;
        for distance in 0..depth {
            for found in [Some(untrained), trained].into_iter().flatten() {
                write!(out, " {} |", percent(sum(&|layer| at(found, layer, distance))))?;
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Rounded so that only all is 100.0 %.
fn percent(recall: Recall) -> String {
    match recall {
        Recall { of: 0, .. } => "–".to_owned(),
        Recall { found, of } => format!("{:.1} %", (1000 * found / of) as f64 / 10.0),
    }
}
