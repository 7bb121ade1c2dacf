//! What is changed in the copy of a script: commands that touch the machine, and comparisons of what is a matter of
//! taste or of buffer sizes.

/// States under the names that packetdrill gives to code on Linux.
const STATES: [(&str, &str); 11] = [
    ("TCPI_SYN_RECEIVED", "TCP_SYN_RECV"),
    ("TCPI_SYN_SENT", "TCP_SYN_SENT"),
    ("TCPI_ESTABLISHED", "TCP_ESTABLISHED"),
    ("TCPI_TIME_WAIT", "TCP_TIME_WAIT"),
    ("TCPI_CLOSE_WAIT", "TCP_CLOSE_WAIT"),
    ("TCPI_CLOSED", "TCP_CLOSE"),
    ("TCPI_LISTEN", "TCP_LISTEN"),
    ("TCPI_LAST_ACK", "TCP_LAST_ACK"),
    ("TCPI_FIN_WAIT_1", "TCP_FIN_WAIT1"),
    ("TCPI_FIN_WAIT_2", "TCP_FIN_WAIT2"),
    ("TCPI_CLOSING", "TCP_CLOSING"),
];

/// The place behind `>` of a line that expects a packet.
fn expectation(line: &str) -> Option<usize> {
    let head = line.find('>')?;
    let is_time = |c: char| c.is_ascii_digit() || "+-.~* \t".contains(c);
    line[..head].chars().all(is_time).then_some(head + 1)
}

/// Google's scripts write to the kernel's files and restore sysctls afterwards. PSH is not compared: Linux sets it
/// on each packet of several segments.
pub fn google(script: &str) -> String {
    each_line(script, google_line)
}

fn each_line(script: &str, change: impl Fn(&str) -> String) -> String {
    script.lines().map(|line| change(line) + "\n").collect()
}

fn google_line(line: &str) -> String {
    let mut line = line.replace("/tmp/sysctl_restore_${PPID}.sh", "true");
    if let Some(at) = line.find("> /sys/") {
        let end = line[at..].find('`').map_or(line.len(), |n| at + n);
        line.replace_range(at..end, "> /dev/null");
    }
    let Some(at) = expectation(&line) else { return line };
    let flags = line[at..].trim_start();
    let start = line.len() - flags.len();
    let end = start + flags.find([' ', '\t']).unwrap_or(0);
    let kept: String = line[start..end].chars().filter(|c| *c != 'P').collect();
    line.replace_range(start..end, &kept);
    line
}

/// FreeBSD's scripts have parts for an implementation of the RFCs and for FreeBSD, of which the former are played.
/// They ask the system for states, which is not there, and compare buffer sizes: as windows of each packet and as
/// SO_RCVBUF, which FreeBSD rounds up to segments.
pub fn freebsd(script: &str) -> String {
    let asks_the_system =
        |line: &str| line.contains("`sockstat") || line.contains("SOL_SOCKET, SO_RCVBUF, [6");
    each_line(&standard_part(script), |line| {
        if asks_the_system(line) { String::new() } else { freebsd_line(line) }
    })
}

/// The script without conditional parts for others than the standard.
fn standard_part(script: &str) -> String {
    let (mut kept, mut is_skipped) = (String::new(), false);
    for line in script.lines() {
        let word = line.trim();
        if let Some(condition) = word.strip_prefix("#if") {
            is_skipped = !condition.contains("STANDARD");
        } else if word.starts_with("#else") {
            is_skipped = !is_skipped;
        } else if word.starts_with("#endif") {
            is_skipped = false;
        } else if !is_skipped {
            kept += line;
            kept.push('\n');
        }
    }
    kept
}

fn freebsd_line(line: &str) -> String {
    let mut line = STATES.iter().fold(line.to_owned(), |l, (from, to)| l.replace(from, to));
    let Some(at) = expectation(&line).and_then(|at| Some(at + line[at..].find(" win ")?)) else {
        return line;
    };
    let number = &line[at + 5..];
    let number = number.len() - number.trim_start().len() + 5;
    let digits = line[at + number..].chars().take_while(char::is_ascii_digit).count();
    line.replace_range(at..at + number + digits, "");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_expected_packets_lose_what_is_not_compared() {
        let google = google_line;
        assert_eq!(google("   +0 > P. 1:10001(10000) ack 1"), "   +0 > . 1:10001(10000) ack 1");
        assert_eq!(google("+.3~+.31 > FP. 1:2(1) ack 1"), "+.3~+.31 > F. 1:2(1) ack 1");
        assert_eq!(google("   +0 < P. 1:2(1) ack 1 win 9"), "   +0 < P. 1:2(1) ack 1 win 9");
        assert_eq!(google("echo 3 > /sys/module/x"), "echo 3 > /dev/null");
        let freebsd = freebsd_line;
        assert_eq!(
            freebsd("+0 >  S. 0:0(0) ack 1 win 65535 <mss 1>"),
            "+0 >  S. 0:0(0) ack 1 <mss 1>"
        );
        assert_eq!(freebsd("+0 < . 1:1(0) ack 1 win 65535"), "+0 < . 1:1(0) ack 1 win 65535");
        assert_eq!(freebsd("tcpi_state == TCPI_CLOSED"), "tcpi_state == TCP_CLOSE");
    }

    #[test]
    fn the_standards_part_of_conditionals_is_kept() {
        let script = "a\n#ifdef STANDARD\nb\n#endif\n#ifdef FreeBSD\nc\n#endif\nd\n";
        assert_eq!(standard_part(script), "a\nb\nd\n");
    }
}
