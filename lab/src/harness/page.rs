//! A report as one HTML page that needs nothing else: no script from elsewhere, no font, no image.
//!
//! The page is a template that draws the report it holds, the JSON as it was written
//! ([`super::report::Report::json`]), so that a page can be made again from a file that was kept:
//! `fulmar-lab page FILE.json`. Charts are SVG of the template's own: none of the chart crates that were looked
//! at draws an interval on a stacked bar or a ratio beside its goals in the colours of the page.

use serde_json::Value;

const TEMPLATE: &str = include_str!("template.html");

/// The page of one report, or of all reports of a command.
pub fn html(report: &Value) -> String {
    let first = report.as_array().and_then(|all| all.first()).unwrap_or(report);
    let title = first["title"].as_str().filter(|t| !t.is_empty()).unwrap_or("fulmar-lab");
    let title = title.replace('&', "&amp;").replace('<', "&lt;");
    // Inside a script element nothing but its end has a meaning to HTML: `<` stands in strings only.
    let data = report.to_string().replace('<', "\\u003c");
    // Sequentially, since each may contain the other's placeholder.
    let (head, rest) = TEMPLATE.split_once("{{title}}").unwrap_or((TEMPLATE, ""));
    let (body, end) = rest.split_once("{{report}}").unwrap_or((rest, ""));
    [head, &title, body, &data, end].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn embedded(page: &str) -> Value {
        let (_, rest) = page.split_once("id=\"report\">").expect("the report's element");
        let (data, _) = rest.split_once("</script>").expect("its end");
        serde_json::from_str(data).expect("JSON")
    }

    #[test]
    fn a_page_holds_its_report_whatever_stands_in_it() {
        for report in [
            json!(null),
            json!([{"title": "a"}, {"title": "b"}]),
            json!({"title": "</script><!-- & {{report}}", "rows": [{"title": "</script>", "n": 1.5}]}),
        ] {
            assert_eq!(embedded(&html(&report)), report);
        }
    }

    #[test]
    fn a_page_is_whole_and_needs_nothing_from_elsewhere() {
        let page = html(&json!({"title": "a < b", "rows": []}));
        assert!(page.contains("<title>a &lt; b</title>") && page.ends_with("</html>\n"));
        for outside in ["src=", "href=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn twenty_parts_of_a_bar_have_twenty_colours() {
        let light = TEMPLATE.split(":root").nth(1).expect("a theme");
        let colour = |n: usize| light.split(&format!("--s{n}: ")).nth(1).map(|rest| &rest[..7]);
        let mut colours: Vec<_> = (0..21).map(|n| colour(n).expect("a colour")).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), 21);
    }
}
