//! Rate over block size as SVG, by hand: two lines, a few ticks.

use std::fmt::Write as _;

use super::report::Row;
use crate::size::Size;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;

/// Draws all rows that are rates of one transport.
pub(crate) fn svg(rows: &[Row]) -> String {
    let axes = Axes::of(rows);
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">"
    );
    let _ = writeln!(out, "<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>");
    text(&mut out, WIDTH / 2.0, 22.0, "middle", &title(rows));
    axes.draw(&mut out, rows);
    let ours: Vec<_> = rows.iter().map(|row| (row.block_bytes, row.gbps_median)).collect();
    let limit: Vec<_> = rows.iter().filter_map(|row| Some((row.block_bytes, row.limit.gbps?))).collect();
    axes.line(&mut out, &limit, "#888888", "6 4");
    axes.line(&mut out, &ours, "#0b62a4", "none");
    legend(&mut out, rows);
    out.push_str("</svg>\n");
    out
}

fn title(rows: &[Row]) -> String {
    rows.first().map_or_else(String::new, |row| {
        let digest = if row.digest { "with digests" } else { "without digests" };
        format!("kvferry {}, {}, {digest}: GB/s over block size", row.transport.name(), row.direction.name())
    })
}

fn legend(out: &mut String, rows: &[Row]) {
    let name = rows.first().map_or("", |row| row.transport.name());
    let mut limits: Vec<&str> = rows.iter().filter_map(|row| row.limit.name.as_deref()).collect();
    limits.sort_unstable();
    limits.dedup();
    let entries = [(name.to_owned(), "#0b62a4", "none"), (limits.join(" or "), "#888888", "6 4")];
    let shown = entries.iter().filter(|(text, ..)| !text.is_empty());
    for (at, (label, colour, dash)) in shown.enumerate() {
        let x = LEFT + 10.0 + 200.0 * at as f64;
        let _ = writeln!(
            out,
            "<line x1=\"{x}\" y1=\"38\" x2=\"{}\" y2=\"38\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>",
            x + 24.0
        );
        text(out, x + 30.0, 42.0, "start", label);
    }
}

/// Where values lie: block sizes by their logarithm, rates from 0.
struct Axes {
    least: f64,
    most: f64,
    step: f64,
    top: f64,
}

impl Axes {
    fn of(rows: &[Row]) -> Self {
        let logs = rows.iter().map(|row| (row.block_bytes as f64).log2());
        let (least, most) = logs.fold((f64::MAX, f64::MIN), |(least, most), log| (least.min(log), most.max(log)));
        let highest = rows.iter().flat_map(|row| [Some(row.gbps_median), row.limit.gbps]).flatten().fold(0.0, f64::max);
        // About five ticks, at 1, 2 or 5 times a power of ten.
        let rough = (highest.max(1e-3)) / 5.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        Self { least, most, step, top: (highest / step).ceil().max(1.0) * step }
    }

    fn x(&self, block_bytes: u64) -> f64 {
        let span = self.most - self.least;
        let part = if span > 0.0 { ((block_bytes as f64).log2() - self.least) / span } else { 0.5 };
        LEFT + 20.0 + part * (WIDTH - LEFT - RIGHT - 40.0)
    }

    fn y(&self, gbps: f64) -> f64 {
        HEIGHT - BOTTOM - gbps / self.top * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, out: &mut String, rows: &[Row]) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut tick = 0.0;
        while tick <= self.top + self.step / 2.0 {
            let y = self.y(tick);
            let _ =
                writeln!(out, "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>");
            let digits = if self.step < 1.0 { 2 } else { 0 };
            text(out, LEFT - 8.0, y + 4.0, "end", &format!("{tick:.digits$}"));
            tick += self.step;
        }
        for row in rows {
            text(out, self.x(row.block_bytes), bottom + 20.0, "middle", &Size(row.block_bytes).to_string());
        }
        text(out, (LEFT + right) / 2.0, HEIGHT - 14.0, "middle", "block");
        text(out, 14.0, TOP - 8.0, "start", "GB/s");
    }

    fn line(&self, out: &mut String, points: &[(u64, f64)], colour: &str, dash: &str) {
        let at = |(bytes, gbps): &(u64, f64)| (self.x(*bytes), self.y(*gbps));
        let path: Vec<String> = points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        if path.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>",
            path.join(" ")
        );
        for (x, y) in points.iter().map(at) {
            let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, label: &str) {
    let label = label.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{label}</text>");
}
