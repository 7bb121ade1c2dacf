//! A route on the command line.

use crate::failure::{Failure, Outcome};
use fulmar::{Cidr, NextHop, Stack};
use std::net::IpAddr;
use std::str::FromStr;

/// `DESTINATION[,via=ADDRESS[+ADDRESS]...][,mtu=BYTES][,from=CIDR]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouteSpec {
    dst: Cidr,
    hops: Vec<NextHop>,
    /// The sources that it is for; `None`: all.
    from: Option<Cidr>,
}

const SYNTAX: &str =
    "expected DESTINATION/LENGTH[,via=ADDRESS[+ADDRESS]...][,mtu=BYTES][,from=SOURCE/LENGTH]";

fn prefix(text: &str) -> Result<Cidr, String> {
    let prefix: Result<Cidr, _> = text.parse();
    prefix.map(Cidr::network).map_err(|_| format!("invalid prefix `{text}`: {SYNTAX}"))
}

impl FromStr for RouteSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<RouteSpec, String> {
        let mut parts = text.split(',');
        let dst = prefix(parts.next().unwrap_or_default())?;
        let (mut via, mut mtu, mut from) = (Vec::new(), None, None);
        for part in parts {
            let wrong = || format!("invalid part `{part}`: {SYNTAX}");
            match part.split_once('=').ok_or_else(wrong)? {
                ("via", all) => {
                    let all = all.split('+').map(|a| a.parse::<IpAddr>().map_err(|_| wrong()));
                    via = all.collect::<Result<_, _>>()?;
                }
                ("mtu", bytes) => mtu = Some(bytes.parse::<usize>().map_err(|_| wrong())?),
                ("from", source) => from = Some(prefix(source)?),
                _ => return Err(wrong()),
            }
        }
        let hop = |via| NextHop { via, mtu, ..NextHop::default() };
        let mut hops: Vec<NextHop> = via.into_iter().map(|a| hop(Some(a))).collect();
        if hops.is_empty() {
            hops.push(hop(None));
        }
        Ok(RouteSpec { dst, hops, from })
    }
}

/// Adds routes to a stack. Those for the same sources share a table, numbered from 1.
pub fn add_all(stack: &Stack, routes: &[RouteSpec]) -> Outcome<()> {
    let mut sources: Vec<Cidr> = Vec::new();
    for RouteSpec { dst, hops, from } in routes {
        let refused = |e| Failure::new(format!("cannot add the route to {dst}: {e}"));
        let table = from.map_or(0, |source| {
            let known = sources.iter().position(|s| *s == source);
            let at = known.unwrap_or_else(|| {
                sources.push(source);
                sources.len() - 1
            });
            at as u32 + 1
        });
        stack.add_route_over(table, *dst, hops).map_err(refused)?;
        if let Some(source) = from {
            stack.set_source_policy(*source, Some(table)).map_err(refused)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_names_its_next_hops_and_its_sources() {
        let spec = "192.0.2.7/24,via=10.0.0.1+10.0.0.3,mtu=1400,from=10.0.0.8/29";
        let route: RouteSpec = spec.parse().unwrap();
        assert_eq!(route.dst, prefix("192.0.2.0/24").unwrap());
        let via: Vec<_> = route.hops.iter().map(|h| (h.via.unwrap(), h.mtu)).collect();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        assert_eq!(via, [(address(1), Some(1400)), (address(3), Some(1400))]);
        assert_eq!(route.from, Some(prefix("10.0.0.8/29").unwrap()));
        let on_link: RouteSpec = "2001:db8::/32".parse().unwrap();
        assert_eq!((on_link.hops.len(), on_link.hops[0].via), (1, None));
    }

    #[test]
    fn an_invalid_route_is_refused_with_the_syntax() {
        for wrong in ["", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/8,via", "10.0.0.0/8,via=x,mtu=y"] {
            let error = wrong.parse::<RouteSpec>().unwrap_err();
            assert!(error.contains("via=ADDRESS"), "{error}");
        }
    }
}
