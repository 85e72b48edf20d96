//! A pass drawn as text.

use outrider::les::spans::{Awaited, Timing, What};

use super::account::overlap;

const COLUMNS: usize = 96;
const SHADES: [char; 5] = [' ', '░', '▒', '▓', '█'];

type Is = fn(&What) -> bool;

/// Rows of shades: of each part of the time how much went to what. Rows that would be empty are left out.
pub fn draw(timing: &Timing) -> Vec<String> {
    let rows: [(&str, Is); 6] = [
        ("computing", |w| !matches!(w, What::Upload { .. } | What::Read { .. } | What::Stall { .. })),
        ("uploading", |w| matches!(w, What::Upload { .. })),
        ("stall: readback", |w| matches!(w, What::Stall { of: Awaited::Results, .. })),
        ("stall: bytes", |w| matches!(w, What::Stall { of: Awaited::Bytes, .. })),
        ("demand reads", |w| matches!(w, What::Read { demand: true, .. })),
        ("speculative reads", |w| matches!(w, What::Read { demand: false, .. })),
    ];
    let step = timing.seconds() / COLUMNS as f64;
    let mut lines = vec![format!("{:<18}{}", "layer", ruler(timing, step))];
    for (name, is) in rows {
        let spans: Vec<_> = timing.spans.iter().filter(|span| is(&span.what)).collect();
        let shade = |column: usize| {
            let begin = timing.begin + column as f64 * step;
            let covered: f64 = spans.iter().map(|span| overlap(span, begin, begin + step)).sum();
            let part = if step > 0.0 { (covered / step).min(1.0) } else { 0.0 };
            // Rounded up, so that what is short can be seen.
            SHADES[((SHADES.len() - 1) as f64 * part).ceil() as usize]
        };
        let drawn: String = (0..COLUMNS).map(shade).collect();
        if !drawn.trim().is_empty() {
            lines.push(format!("{name:<18}{}", drawn.trim_end()));
        }
    }
    lines
}

/// Layers' numbers where they begin, as far as there is room.
fn ruler(timing: &Timing, step: f64) -> String {
    let mut ruler = String::new();
    for span in &timing.spans {
        let (What::Mix { layer } | What::Stall { layer, of: Awaited::Results }) = span.what else { continue };
        let column = (((span.begin - timing.begin) / step) as usize).min(COLUMNS);
        if column >= ruler.len() + usize::from(!ruler.is_empty()) {
            ruler.push_str(&" ".repeat(column - ruler.len()));
            ruler.push_str(&layer.to_string());
        }
    }
    ruler
}

#[cfg(test)]
mod tests {
    use outrider::les::spans::{Outcome, Span};

    use super::*;

    #[test]
    fn a_pass_is_drawn_to_scale() {
        let span = |what, begin, end| Span { what, begin, end };
        let outcome = Outcome::Arrived;
        let spans = vec![
            span(What::Mix { layer: 0 }, 10.0, 34.0),
            span(What::Stall { layer: 0, of: Awaited::Bytes }, 34.0, 58.0),
            span(What::Read { layer: 0, expert: 0, demand: true, outcome }, 34.0, 58.0),
            span(What::Mix { layer: 1 }, 58.0, 106.0),
        ];
        let lines = draw(&Timing { begin: 10.0, end: 106.0, spans });
        let bar = |from: usize, to: usize| format!("{}{}", " ".repeat(from), "█".repeat(to - from));
        assert_eq!(
            lines,
            [
                format!("{:<18}0{}1", "layer", " ".repeat(47)),
                format!("{:<18}{}{}", "computing", bar(0, 24), bar(24, 72)),
                format!("{:<18}{}", "stall: bytes", bar(24, 48)),
                format!("{:<18}{}", "demand reads", bar(24, 48)),
            ]
        );
        assert_eq!(draw(&Timing::default()), [format!("{:<18}", "layer")]);
    }
}
