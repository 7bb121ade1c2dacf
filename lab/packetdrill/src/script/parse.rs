//! Reads a script. What the runner does not know is an error, never ignored.

use std::time::Duration;

use super::call::Call;
use super::packet::{IcmpKind, Packet, Segment, number};
use super::{Action, Assertion, Event, Script, When};

/// Reads a script.
///
/// # Errors
/// The line and what is wrong with it.
pub fn parse(text: &str) -> Result<Script, String> {
    let mut script = Script::default();
    for (at, line) in text.lines().enumerate() {
        let line_number = at + 1;
        let line = line.split("//").next().unwrap_or("").trim();
        let told = |why: String| format!("line {line_number}: {why}");
        if line.is_empty() {
            continue;
        }
        if let Some(option) = line.strip_prefix("--") {
            set_option(&mut script, option).map_err(told)?;
            continue;
        }
        let (when, action) = parse_event(line).map_err(told)?;
        script.events.push(Event { line: line_number, when, action });
    }
    Ok(script)
}

fn set_option(script: &mut Script, option: &str) -> Result<(), String> {
    match option.split_once('=') {
        Some(("ip_version", version)) => script.is_v6 = version == "ipv6",
        Some(("tolerance_usecs", us)) => {
            script.tolerance = Some(Duration::from_micros(u64::from(number(us)?)));
        }
        _ => return Err(format!("unknown option `{option}`")),
    }
    Ok(())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| format!("`{text}` is no time"))?;
    Duration::try_from_secs_f64(value).map_err(|_| format!("`{text}` is no time"))
}

/// `+1`, `1`, `+1~+2`, `+1...2`, `*`: when, and when a blocking call returns.
fn parse_when(word: &str) -> Result<(When, Option<Duration>), String> {
    if word == "*" {
        return Ok((When::Any, None));
    }
    if let Some((from, to)) = word.split_once('~') {
        let (from, to) = (from.trim_start_matches('+'), to.trim_start_matches('+'));
        return Ok((When::Within(seconds(from)?, seconds(to)?), None));
    }
    let (start, end) = match word.split_once("...") {
        Some((start, end)) => (start, Some(seconds(end)?)),
        None => (word, None),
    };
    Ok(match start.strip_prefix('+') {
        Some(after) => (When::After(seconds(after)?), end),
        None => (When::At(seconds(start)?), end),
    })
}

fn parse_event(line: &str) -> Result<(When, Action), String> {
    if line.starts_with('`') {
        return Ok((When::After(Duration::ZERO), parse_sysctl(line)?));
    }
    let (word, rest) = line.split_once(char::is_whitespace).ok_or("a time alone")?;
    let (when, end) = parse_when(word)?;
    let rest = rest.trim();
    let action = match rest.as_bytes().first() {
        Some(b'<') => Action::Inject(parse_packet(rest[1..].trim())?),
        Some(b'>') => Action::Expect(parse_packet(rest[1..].trim())?),
        Some(b'%') => Action::Assert(parse_assertion(rest)?),
        Some(b'`') => parse_sysctl(rest)?,
        _ => Action::Call(parse_call(rest)?, end),
    };
    Ok((when, action))
}

/// Sysctls of one command, `sysctl -q A=1 && sysctl -q B=2`: the only one that the runner knows, since packetdrill
/// takes one command before the first event.
fn parse_sysctl(text: &str) -> Result<Action, String> {
    let setting = |command: &str| {
        let setting = command.trim().strip_prefix("sysctl -q ");
        let setting = setting.ok_or("a command that is not `sysctl -q`")?;
        let (name, value) = setting.split_once('=').ok_or("a sysctl without `=`")?;
        Ok((name.to_owned(), value.to_owned()))
    };
    let commands = text.trim_matches('`').split("&&");
    Ok(Action::Sysctls(commands.map(setting).collect::<Result<_, String>>()?))
}

fn parse_packet(text: &str) -> Result<Packet, String> {
    let Some(icmp) = text.strip_prefix("icmp unreachable ") else {
        return Ok(Packet::Tcp(Segment::parse(text)?));
    };
    let (what, quoted) = icmp.split_once('[').ok_or("an ICMP error that quotes nothing")?;
    let words: Vec<&str> = what.split_whitespace().collect();
    let kind = match words[..] {
        ["host_unreachable"] => IcmpKind::HostUnreachable,
        ["port_unreachable"] => IcmpKind::PortUnreachable,
        ["frag_needed", "mtu", mtu] => IcmpKind::TooBig(number(mtu)? as u16),
        _ => return Err(format!("unknown ICMP error `{what}`")),
    };
    let (seq, rest) = quoted.split_once(':').ok_or("no `:`")?;
    let bytes = rest.split(['(', ')']).nth(1).unwrap_or("");
    Ok(Packet::Icmp(kind, number(seq)?, number(bytes)? as usize))
}

fn parse_assertion(text: &str) -> Result<Assertion, String> {
    let inner = text.trim_start_matches("%{").trim_end_matches("}%").trim();
    let words: Vec<&str> = inner.split_whitespace().collect();
    match words[..] {
        ["assert", field, operator, n] => Ok(Assertion {
            field: field.to_owned(),
            operator: operator.to_owned(),
            number: u64::from(number(n)?),
        }),
        _ => Err(format!("not `assert FIELD OPERATOR NUMBER`: `{inner}`")),
    }
}

fn parse_call(text: &str) -> Result<Call, String> {
    let (name, rest) = text.split_once('(').ok_or("neither a packet nor a call")?;
    let (arguments, result) = rest.split_once(") =").ok_or("a call without a result")?;
    let mut words = result.split_whitespace();
    let result = words.next().ok_or("a call without a result")?;
    let result = result.parse().map_err(|_| format!("`{result}` is no result"))?;
    Ok(Call {
        name: name.trim().to_owned(),
        arguments: arguments.split(',').map(|a| a.trim().to_owned()).collect(),
        result,
        errno: words.next().map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runner_does_not_know_is_an_error() {
        for text in [
            "+0 frobnicate",
            "`tc qdisc replace dev tun0 root fq`",
            "--wire_client",
            "+0 < icmp unreachable net_unreachable [1:2(1)]",
            "+x < . 1:1(0) ack 1",
            "+0 %{ print(tcpi_rtt) }%",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_and_results_are_read() {
        let script =
            parse("+.1...0.3 read(4, ..., 10) = -1 EAGAIN (no data)\n+0~+.2 > . 1:1(0) ack 1");
        let events = script.unwrap().events;
        let Action::Call(call, end) = &events[0].action else { panic!("a call") };
        assert_eq!((call.result, call.errno.as_deref()), (-1, Some("EAGAIN")));
        assert_eq!(*end, Some(Duration::from_millis(300)));
        assert_eq!(events[1].when, When::Within(Duration::ZERO, Duration::from_millis(200)));
    }
}
