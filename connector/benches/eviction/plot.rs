//! The figures as a picture: a panel for each trace.

use std::fmt::Write;

use super::Point;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 300.0;
const MARGIN: f64 = 50.0;

/// A name, the best that can be, and its points, for each trace.
pub(crate) fn svg(traces: &[(String, f64, Vec<Point>)]) -> String {
    let (all, mut out) = (WIDTH * traces.len() as f64, String::new());
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {all} {HEIGHT}' font-family='sans-serif' font-size='12'>\n\
         <rect width='{all}' height='{HEIGHT}' fill='white'/>\n"
    );
    for (number, (name, best, points)) in traces.iter().enumerate() {
        let left = WIDTH * number as f64 + MARGIN;
        let (width, height) = (WIDTH - 1.5 * MARGIN, HEIGHT - 2.0 * MARGIN);
        let least = points.iter().map(|point| point.share.log2()).fold(0.0, f64::min).floor().min(-1.0);
        let x = |share: f64| left + (share.log2() - least) / -least * width;
        let y = |found: f64| MARGIN + (1.0 - found) * height;
        let bottom = y(0.0);
        let _ = writeln!(out, "<text x='{left}' y='30' font-weight='bold'>{name}</text>");
        let _ = writeln!(out, "<path d='M{left} {MARGIN}V{bottom}H{}' fill='none' stroke='black'/>", left + width);
        for tenths in [0, 5, 10] {
            let found = f64::from(tenths) / 10.0;
            let _ = writeln!(out, "<text x='{}' y='{}' text-anchor='end'>{found}</text>", left - 6.0, y(found) + 4.0);
        }
        for power in (least as i32..=0).step_by(2) {
            let (share, part) = (f64::from(power).exp2(), 1_u64 << -power);
            let _ = writeln!(out, "<text x='{}' y='{}' text-anchor='middle'>1/{part}</text>", x(share), bottom + 16.0);
        }
        let _ = writeln!(out, "<text x='{left}' y='{}'>cache, of all distinct blocks; up: found</text>", bottom + 34.0);
        let _ = writeln!(out, "<path d='M{left} {}h{width}' stroke='gray' stroke-dasharray='4'/>", y(*best));
        for (color, label, of) in
            [("#1f77b4", "LRU", (|point| point.lru) as fn(&Point) -> f64), ("#d62728", "S3-FIFO", |point| point.s3fifo)]
        {
            let path: Vec<String> =
                points.iter().map(|point| format!("{:.1} {:.1}", x(point.share), y(of(point)))).collect();
            let _ = writeln!(out, "<path d='M{}' fill='none' stroke='{color}' stroke-width='2'/>", path.join("L"));
            let row = if label == "LRU" { 44.0 } else { 58.0 };
            let _ = writeln!(out, "<text x='{}' y='{row}' fill='{color}'>{label}</text>", left + width - 50.0);
        }
    }
    out + "</svg>\n"
}
