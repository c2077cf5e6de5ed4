//! The report as a self-contained HTML page.

use std::fmt::Write;

use super::tables::ReportPart;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#1c2733}\
    table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}\
    th,td{padding:.25em .8em;border-bottom:1px solid #d8dee4;text-align:right;vertical-align:top}\
    th:first-child,td:first-child{text-align:left}th{background:#f3f5f7}\
    .meets{color:#12692f}.short{color:#a3210b;font-weight:600}pre{background:#f3f5f7;padding:1em;overflow:auto}\
    svg{max-width:100%;height:auto}";

/// The whole page, with the plots embedded.
pub(crate) fn page(parts: &[ReportPart], plots: &[(&'static str, String)]) -> String {
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Penstock: benchmark report</title>\
         <style>{STYLE}</style></head><body>\n<h1>Penstock: benchmark report</h1>\n"
    );
    for part in parts {
        // Writing to a string does not fail.
        let _ = match part {
            ReportPart::Heading(heading) => writeln!(text, "<h2>{}</h2>", escaped(heading)),
            ReportPart::Text(paragraph) => writeln!(text, "<p>{}</p>", marked(paragraph)),
            ReportPart::Table(rows) => writeln!(text, "{}", table(rows)),
            ReportPart::Plot(name) => {
                let plot = plots.iter().find(|(other, _)| other == name);
                writeln!(text, "{}", plot.map_or("", |(_, svg)| svg))
            }
        };
    }
    text.push_str("</body></html>\n");
    text
}

fn table(rows: &[Vec<String>]) -> String {
    let mut text = "<table>".to_owned();
    for (index, row) in rows.iter().enumerate() {
        text.push_str("<tr>");
        let tag = if index == 0 { "th" } else { "td" };
        for cell in row {
            let class = match cell.as_str() {
                "meets" => " class=\"meets\"",
                "falls short" => " class=\"short\"",
                _ => "",
            };
            let _ = write!(text, "<{tag}{class}>{}</{tag}>", escaped(cell));
        }
        text.push_str("</tr>\n");
    }
    text + "</table>"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Escapes text and renders `code` and **emphasis**.
fn marked(text: &str) -> String {
    let mut marked = escaped(text);
    for (mark, open, close) in [("**", "<strong>", "</strong>"), ("`", "<code>", "</code>")] {
        let parts: Vec<&str> = marked.split(mark).collect();
        let mut next = String::new();
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                next.push_str(if index % 2 == 1 { open } else { close });
            }
            next.push_str(part);
        }
        marked = next;
    }
    marked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_content_is_escaped() {
        let rows = [vec!["a<b".to_owned(), "meets".to_owned()], vec!["x & y".to_owned(), "falls short".to_owned()]];
        let page = page(&[ReportPart::Table(rows.to_vec()), ReportPart::Text("`code` and **more**".to_owned())], &[]);
        for part in ["a&lt;b", "x &amp; y", "class=\"short\"", "<code>code</code> and <strong>more</strong>"] {
            assert!(page.contains(part), "{part} in {page}");
        }
    }
}
