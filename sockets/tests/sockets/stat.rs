//! The document of a stack has what the pages promise.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use fulmar::TcpListener;
use fulmar::stat::{Document, VERSION};
use serde_json::Value;

use crate::support::{connection, stacks, within};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

fn page(name: &str) -> String {
    fs::read_to_string(docs().join(name)).unwrap()
}

/// What stands in code type.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The names in the first column of the rows between two lines of a page.
fn first_column<'a>(page: &'a str, head: &str) -> Vec<&'a str> {
    let (_, table) = page.split_once(head).unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.split('|').nth(1)).flat_map(names).collect()
}

fn listening() -> Value {
    let (a, _b) = stacks();
    let _l = TcpListener::bind(&a, "0.0.0.0:80").unwrap();
    serde_json::to_value(a.stat().unwrap().document()).unwrap()
}

#[test]
fn the_document_of_a_stack_is_read_as_it_was_written() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        c.write_all(b"hello").unwrap();
        s.read_exact(&mut [0; 5]).unwrap();
        // The answer acknowledges.
        s.write_all(b"x").unwrap();
        c.read_exact(&mut [0; 1]).unwrap();
        let _l = TcpListener::bind(&a, "0.0.0.0:80").unwrap();
        let written = a.stat().unwrap().document();
        let text = serde_json::to_string(&written).unwrap();
        assert_eq!(serde_json::from_str::<Document>(&text).unwrap(), written);
        assert_eq!((written.version, written.sockets.len()), (VERSION, 2));
        let tcp = written.sockets.iter().find_map(|s| s.tcp.as_ref()).expect("a connection");
        assert!(tcp.acked_bytes >= 5 && tcp.rto_us > 0.0 && tcp.tcp_info.sack, "{tcp:?}");
        let listener =
            written.sockets.iter().find_map(|s| s.listener.as_ref()).expect("a listener");
        assert!(listener.accept_limit > 0 && written.device.tx_frames > 0, "{written:?}");
    });
}

#[test]
fn a_listener_has_every_number_of_its_page() {
    within(|| {
        let document = listening();
        let sockets = document["sockets"].as_array().unwrap();
        let listener = sockets.iter().find(|s| s["state"] == "LISTEN").unwrap();
        let page = page("listeners.md");
        let promised = first_column(&page, "| name | counts |");
        assert!(promised.contains(&"pending_reset") && promised.len() > 15, "{promised:?}");
        for name in promised {
            assert!(listener[name].is_u64(), "{name} of docs/listeners.md");
        }
    });
}

/// `DeviceStats::rx_missed` and its like on any page; counters in code type are in the document by their list.
#[test]
fn a_device_has_every_field_that_a_page_names() {
    within(|| {
        let document = listening();
        let mut found = Vec::new();
        for file in fs::read_dir(docs()).unwrap().map(|entry| entry.unwrap().path()) {
            let Some("md") = file.extension().and_then(|x| x.to_str()) else { continue };
            let text = fs::read_to_string(&file).unwrap();
            for field in names(&text).filter_map(|name| name.strip_prefix("DeviceStats::")) {
                assert!(!document["device"][field].is_null(), "{field} of {}", file.display());
                found.push(field.to_owned());
            }
        }
        assert!(found.iter().any(|field| field == "rx_missed"), "{found:?}");
        for field in ["rx_missed", "tx_held", "link"] {
            assert!(!document["device"][field].is_null(), "{field}");
        }
    });
}
