//! Ways of a report that are a name and a time each: a table, and a curve where names differ in a number
//! only.

use serde_json::Value;

use super::{Block, Cell, Section, Table, list, word};
use crate::page::{Line, Lines};

/// The section, if the report has ways.
pub fn section(report: &Value) -> Option<Section> {
    let ways = list(&report["ways"]);
    let chart = curves(ways);
    let mut blocks = Vec::new();
    if !chart.is_empty() {
        blocks.push(Block::Lines(chart));
    }
    blocks.push(Block::Table(table(ways)));
    (!ways.is_empty()).then(|| Section::new("Every way", blocks))
}

fn table(ways: &[Value]) -> Table {
    let head = [
        ("way", "the stable name"),
        ("median", "nanoseconds, or what the name says"),
        ("from", "lower end of the 95 % interval"),
        ("to", "upper end of the 95 % interval"),
        ("runs", "how often it was measured"),
    ];
    let row = |way: &Value| {
        let number = |key: &str| way[key].as_f64().map_or(Cell::Nothing, |v| Cell::Number(v, None));
        let numbers = ["median", "low", "high", "runs"].map(number);
        [Cell::Text(word(&way["name"]))].into_iter().chain(numbers).collect()
    };
    Table {
        caption: "Medians, in nanoseconds unless the name says otherwise.".to_owned(),
        head: head.map(|(name, hint)| (name.to_owned(), hint.to_owned())).to_vec(),
        rows: ways.iter().map(row).collect(),
    }
}

/// A curve per name whose number changes.
fn curves(ways: &[Value]) -> Lines {
    let mut lines: Vec<Line> = Vec::new();
    for way in ways {
        let Some(((name, number), median)) =
            numbered(&word(&way["name"])).zip(way["median"].as_f64())
        else {
            continue;
        };
        match lines.iter_mut().find(|l| l.name == name) {
            Some(line) => line.points.push((number, median)),
            None => lines.push(Line { name, colour: 0, points: vec![(number, median)] }),
        }
    }
    // Two points, or a few threads, are a table's matter.
    lines.retain(|l| l.points.len() > 2);
    for (i, line) in lines.iter_mut().enumerate() {
        line.colour = [0, 2, 3, 4, 5, 6, 1, 7][i % 8];
    }
    Lines {
        caption: "The number in the name of a way across, its median up.".to_owned(),
        units: ("how many".to_owned(), "ns".to_owned()),
        lines,
    }
}

/// A name without the part that is a number, and that number.
fn numbered(name: &str) -> Option<(String, f64)> {
    let number = name.split('.').find_map(|part| part.parse::<u64>().ok())?;
    let rest = name.split('.').filter(|part| part.parse::<u64>().is_err());
    Some((rest.collect::<Vec<_>>().join(" "), number as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_that_differ_in_a_number_are_a_curve_and_all_are_in_the_table() {
        let way = |name: &str, median: f64| json!({ "name": name, "median": median, "runs": 3 });
        let ways = [1, 100, 1_000_000].map(|n| way(&format!("demux.{n}.burst64"), n as f64));
        let ways: Vec<Value> =
            ways.into_iter().chain([way("closed_port.ns_per_drop", 9.0)]).collect();
        let lines = curves(&ways).lines;
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].name, "demux burst64");
        assert_eq!(lines[0].points[1], (100.0, 100.0));
        let section = section(&json!({ "ways": ways })).expect("a section");
        assert_eq!(section.blocks.len(), 2);
        let Some(Block::Table(table)) = section.blocks.last() else { panic!("no table") };
        assert_eq!(table.rows.len(), 4);
    }

    #[test]
    fn a_report_without_ways_has_no_such_section() {
        assert!(section(&json!({ "rows": [] })).is_none());
    }
}
