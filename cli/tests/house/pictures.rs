//! The picture of the README is drawn from the committed results. `FULMAR_UPDATE=1 cargo test -p fulmar-cli
//! --test pictures` draws it again.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

const PICTURE: &str = "docs/pictures/costs.svg";

/// One bar: the cost over fulmar divided by the kernel's.
struct Bar {
    work: &'static str,
    kernel: &'static str,
    /// The JSON file below `results`, and the ratio in it.
    file: &'static str,
    ratio: &'static str,
    /// The file has the kernel's cost divided by fulmar's.
    is_inverse: bool,
}

const BARS: [Bar; 7] = [
    Bar {
        work: "two processes, shared memory: latency of a request",
        kernel: "UDP over loopback",
        file: "wake/wake.json",
        ratio: "wake.rr.shm.two_cpus.vs_kernel",
        is_inverse: false,
    },
    Bar {
        work: "two processes, shared memory: CPU per byte",
        kernel: "AF_UNIX",
        file: "send/send.json",
        ratio: "send.shm.vs_unix",
        is_inverse: false,
    },
    Bar {
        work: "two stacks in one process: CPU per byte",
        kernel: "TCP over veth",
        file: "stream/stream.json",
        ratio: "stream.link.same_cpu.vs_kernel",
        is_inverse: false,
    },
    Bar {
        work: "datagrams in bursts of 64 over TAP: CPU each",
        kernel: "sendmmsg over veth",
        file: "udp/udp.json",
        ratio: "udp.tap.batch64.kernel_vs_fulmar",
        is_inverse: true,
    },
    Bar {
        work: "one request at a time over TAP: latency",
        kernel: "UDP over veth",
        file: "wake/wake.json",
        ratio: "wake.rr.tap.two_cpus.vs_kernel",
        is_inverse: false,
    },
    Bar {
        work: "bulk receive over TAP: CPU per byte",
        kernel: "TCP over veth",
        file: "stream/stream.json",
        ratio: "stream.recv.two_cpus.vs_kernel",
        is_inverse: false,
    },
    Bar {
        work: "bulk send over TAP: CPU per byte",
        kernel: "TCP over veth",
        file: "stream/stream.json",
        ratio: "stream.send.two_cpus.vs_kernel",
        is_inverse: false,
    },
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

impl Bar {
    fn length(&self) -> f64 {
        let median = median(self.file, self.ratio);
        if self.is_inverse { 1.0 / median } else { median }
    }
}

fn median(file: &str, ratio: &str) -> f64 {
    let path = root().join("results").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let results: Value = serde_json::from_str(&text).expect("JSON");
    let median = results["ratios"][ratio]["median"].as_f64();
    median.unwrap_or_else(|| panic!("{file} has no ratio {ratio}"))
}

fn draw() -> String {
    const TOP: usize = 50;
    const ROW: usize = 30;
    const LEFT: f64 = 350.0;
    const ONE: f64 = 300.0;
    const STYLE: &str = "text{fill:#24292f}.s{fill:#57606a;font-size:11px}.b{fill:#1f6feb}\
        line{stroke:#8c959f;stroke-dasharray:4 3}@media(prefers-color-scheme:dark){text{fill:#e6edf3}\
        .s{fill:#9da7b1}.b{fill:#58a6ff}}";
    let bottom = TOP + ROW * BARS.len();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 840 {}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<style>{STYLE}</style>\n\
         <text x=\"10\" y=\"24\" font-size=\"15\">The cost of the same work over fulmar; \
         the kernel's own way is 1. Shorter is better.</text>\n",
        bottom + 24
    );
    for (row, bar) in BARS.iter().enumerate() {
        let (y, value) = (TOP + ROW * row, bar.length());
        let (end, work, kernel) = (LEFT + value * ONE, bar.work, bar.kernel);
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{}\" text-anchor=\"end\">{work}</text>\n\
             <rect class=\"b\" x=\"{LEFT:.0}\" y=\"{y}\" width=\"{:.0}\" height=\"16\" rx=\"2\"/>\n\
             <text x=\"{:.0}\" y=\"{}\">{value:.2}<tspan class=\"s\" dx=\"8\">of {kernel}</tspan></text>",
            LEFT - 10.0,
            y + 13,
            value * ONE,
            end + 8.0,
            y + 13,
        );
    }
    let one = LEFT + ONE;
    let _ = writeln!(
        svg,
        "<line x1=\"{one:.0}\" y1=\"{}\" x2=\"{one:.0}\" y2=\"{bottom}\"/>\n\
         <text class=\"s\" x=\"{one:.0}\" y=\"{}\" text-anchor=\"middle\">the kernel: 1</text>\n</svg>",
        TOP - 8,
        bottom + 14,
    );
    svg
}

#[test]
fn the_picture_of_the_readme_is_that_of_the_results() {
    let path = root().join(PICTURE);
    let drawn = draw();
    if std::env::var_os("FULMAR_UPDATE").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder for the picture");
        fs::write(&path, &drawn).expect("the picture");
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == drawn, "{PICTURE} is not up to date: run this test with FULMAR_UPDATE=1");
}

/// Each row of the README that names a ratio in a comment, `<!-- FILE RATIO -->`, holds its median.
#[test]
fn figures_of_the_readme_are_those_of_the_results() {
    let page = fs::read_to_string(root().join("README.md")).expect("the README");
    let mut checked = 0;
    for line in page.lines() {
        let Some((before, name)) = line.split_once("<!-- ") else { continue };
        let Some((file, ratio)) = name.split_once(" -->").and_then(|(n, _)| n.split_once(' '))
        else {
            continue;
        };
        let text = before.rsplit("**").nth(1).expect("a figure between asterisks");
        let decimals = text.split_once('.').map_or(0, |(_, d)| d.len());
        let median = median(file, ratio);
        assert_eq!(text, format!("{median:.decimals$}"), "{line}");
        checked += 1;
    }
    assert!(checked >= 3, "the README names {checked} ratios");
}
