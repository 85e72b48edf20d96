//! Progress on standard error; nothing where that is no terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts bytes.
pub fn bytes(what: &'static str) -> ProgressBar {
    let template = "{msg} {bar:32} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    ProgressBar::new(0).with_style(style).with_message(what)
}

/// A bar that counts `unit`, in words.
pub fn count(what: &'static str, unit: &'static str) -> ProgressBar {
    let template = format!("{{msg}} {{bar:32}} {{human_pos}}/{{human_len}} {unit}, {{eta}} left");
    let style = ProgressStyle::with_template(&template).expect("the template is valid");
    ProgressBar::new(0).with_style(style).with_message(what)
}

/// Moves a bar to `done` of `total`.
pub fn show(bar: &ProgressBar, done: u64, total: u64) {
    bar.set_length(total);
    bar.set_position(done);
}
