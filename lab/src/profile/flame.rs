//! Samples as a flame graph: the widths are time, the boxes stand on those that called them.

use std::collections::BTreeMap;
use std::io;

use inferno::flamegraph::{self, Options};

/// The graph as SVG, from folded stacks (`outer;inner;innermost`) with their weights.
///
/// # Errors
/// Nothing to draw.
pub fn svg(title: &str, stacks: &BTreeMap<String, u64>) -> io::Result<Vec<u8>> {
    if stacks.is_empty() {
        return Err(io::Error::other("no samples for a flame graph"));
    }
    let lines: Vec<String> = stacks.iter().map(|(stack, n)| format!("{stack} {n}")).collect();
    let mut options = Options::default();
    options.title = title.to_owned();
    options.count_name = "samples".to_owned();
    let mut svg = Vec::new();
    let drawn = flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg);
    drawn.map_err(|e| io::Error::other(e.to_string()))?;
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_names_its_boxes() {
        let stacks = [("near;write;copy".to_owned(), 3), ("near;write;output".to_owned(), 1)];
        let drawn = svg("a title", &stacks.into_iter().collect()).unwrap();
        let text = String::from_utf8(drawn).unwrap();
        assert!(text.contains("<svg") && text.contains("a title") && text.contains("output"));
        assert!(svg("nothing", &BTreeMap::new()).is_err());
    }
}
