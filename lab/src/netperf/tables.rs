//! netperf's own result tables, column by column, and its lists of KEY=VALUE. Scripts read these, so
//! their widths and words are those of netperf 2.7.

use super::client::{Summary, TESTS, Test, TestOptions};
use super::confidence::{Goal, Level};
use super::meter::method_letter;
use std::fmt::Write as _;

/// The unit in which throughput is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// K, M, G: powers of 1024 bytes.
    Bytes(char),
    /// b, k, m, g: powers of 1000 bits.
    Bits(char),
    /// x: transactions.
    Transactions,
}

impl Unit {
    /// From the letter of -f.
    ///
    /// # Errors
    /// There is no such unit.
    pub fn from_letter(letter: &str) -> Result<Unit, String> {
        match letter {
            "B" | "K" | "M" | "G" => Ok(Unit::Bytes(letter.chars().next().unwrap_or('B'))),
            "b" | "k" | "m" | "g" => Ok(Unit::Bits(letter.chars().next().unwrap_or('b'))),
            "x" => Ok(Unit::Transactions),
            _ => Err(format!("`{letter}` is not a unit: one of B K M G b k m g x")),
        }
    }

    /// The name in headings.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Bytes('K') => "KBytes",
            Unit::Bytes('M') => "MBytes",
            Unit::Bytes('G') => "GBytes",
            Unit::Bytes(_) => "Bytes",
            Unit::Bits('k') => "10^3bits",
            Unit::Bits('m') => "10^6bits",
            Unit::Bits('g') => "10^9bits",
            Unit::Bits(_) => "10^0bits",
            Unit::Transactions => "Trans",
        }
    }

    /// `per_second` bytes (or transactions) per second, in this unit.
    pub fn of(self, per_second: f64) -> f64 {
        match self {
            Unit::Bytes('K') => per_second / 1024.0,
            Unit::Bytes('M') => per_second / (1024.0 * 1024.0),
            Unit::Bytes('G') => per_second / (1024.0 * 1024.0 * 1024.0),
            Unit::Bits('b') => per_second * 8.0,
            Unit::Bits('k') => per_second * 8.0 / 1e3,
            Unit::Bits('m') => per_second * 8.0 / 1e6,
            Unit::Bits('g') => per_second * 8.0 / 1e9,
            _ => per_second,
        }
    }
}

/// How results are to look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Style {
    /// The unit; transactions mean the test's own.
    pub unit: Unit,
    /// Banner and headings.
    pub has_headings: bool,
    /// 0: one number; 1: the table; 2: more of it.
    pub verbosity: u32,
}

/// A test that was done: what was asked and what came of it.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// What was asked.
    pub options: &'a TestOptions,
    /// How sure it was to be.
    pub goal: &'a Goal,
    /// What came of it.
    pub summary: &'a Summary,
    /// How to show it.
    pub style: Style,
}

/// The line before a test: which, between whom, with what.
pub fn banner(options: &TestOptions, goal: &Goal, stack: &str, host: &str, is_v4: bool) -> String {
    let title = TESTS.iter().find(|t| t.0 == options.test).map_or("", |t| t.2);
    let (any, family) = if is_v4 { ("0.0.0.0", "AF_INET") } else { ("::0", "AF_INET6") };
    let mut line =
        format!("{title} from {any} ({any}) port 0 {family} to {host} () port 0 {family}");
    if goal.level != Level::None {
        let half = goal.width * 50.0;
        let _ = write!(
            line,
            " : +/-{half:.3}% @ {} conf. ",
            format_args!("{:2}%", goal.level.percent())
        );
    }
    if options.local.tuning.nodelay || options.remote.tuning.nodelay {
        line.push_str(" : nodelay");
    }
    // Not in netperf's banner: two results that differ in this alone would look the same.
    if options.local_given {
        line.push_str(" : sent by reference");
    }
    if options.remote_posted {
        line.push_str(" : received into posted buffers");
    }
    if title.contains("REQUEST/RESPONSE") {
        let _ = write!(line, " : first burst {}", options.burst);
    }
    if !stack.is_empty() {
        let _ = write!(line, " : {stack}");
    }
    line
}

/// The warning where the goal was not reached.
pub fn warning(summary: &Summary) -> String {
    let [throughput, local, remote] = summary.widths.map(|w| w * 100.0);
    format!(
        "!!! WARNING\n\
         !!! Desired confidence was not achieved within the specified iterations.\n\
         !!! This implies that there was variability in the test environment that\n\
         !!! must be investigated before going further.\n\
         !!! Confidence intervals: Throughput      : {throughput:4.3}%\n\
         !!!                       Local CPU util  : {local:4.3}%\n\
         !!!                       Remote CPU util : {remote:4.3}%\n\n"
    )
}

impl Shown<'_> {
    /// Everything below the banner.
    pub fn text(&self) -> String {
        let warning = if self.summary.is_sure { String::new() } else { warning(self.summary) };
        let table = match self.options.test {
            _ if self.style.verbosity == 0 => self.one_number(),
            Test::UdpStream => self.datagram_table(),
            t if t.is_transactional() => self.transaction_table(),
            _ => self.stream_table(),
        };
        warning + &table
    }

    fn has_cpu(&self) -> bool {
        self.options.measures_local || self.options.measures_remote
    }

    /// The unit for bytes: transactions are none.
    fn byte_unit(&self) -> Unit {
        match self.style.unit {
            Unit::Transactions => Unit::Bits('m'),
            unit => unit,
        }
    }

    fn is_in_transactions(&self) -> bool {
        self.options.test.is_transactional() && self.style.unit == Unit::Transactions
    }

    /// Throughput in the unit of the table.
    fn throughput(&self) -> f64 {
        let rate = self.summary.rate;
        if !self.options.test.is_transactional() {
            return self.byte_unit().of(rate);
        }
        if self.is_in_transactions() {
            return rate;
        }
        let (request, response) = self.options.exchange_bytes;
        self.style.unit.of(rate * (request + response) as f64)
    }

    fn letters(&self) -> (char, char) {
        let last = &self.summary.last;
        (method_letter(last.local.cpu_method), method_letter(last.remote.cpu_method))
    }

    fn one_number(&self) -> String {
        let (ours, theirs) = self.summary.service_demand;
        match (self.options.measures_local, self.options.measures_remote) {
            (true, _) => format!("{ours:6.3} {} \n", self.letters().0),
            (_, true) => format!("{theirs:6.3} {} \n", self.letters().1),
            _ => format!("{:7.2} \n", self.throughput()),
        }
    }

    fn stream_table(&self) -> String {
        let (s, last) = (self.summary, &self.summary.last);
        let is_reverse = self.options.test == Test::TcpMaerts;
        let (receiver, sender) =
            if is_reverse { (&last.local, &last.remote) } else { (&last.remote, &last.local) };
        let mut text = self.stream_headings(is_reverse);
        let _ = write!(
            text,
            "{:6} {:6} {:6}    {:<6.2}   ",
            receiver.buffers.0.recv, sender.buffers.0.send, sender.send_bytes, s.elapsed
        );
        let throughput = self.throughput();
        if self.has_cpu() {
            let _ = writeln!(
                text,
                "  {throughput:7.2}   {:<6.2}   {:<6.2}   {:<6.3}  {:<6.3} ",
                s.cpu_percent.0, s.cpu_percent.1, s.service_demand.0, s.service_demand.1
            );
        } else {
            let _ = writeln!(text, "{throughput:7.2}   ");
        }
        if self.style.verbosity > 1 {
            text.push_str(&self.stream_details(is_reverse));
        }
        text
    }

    fn stream_headings(&self, is_reverse: bool) -> String {
        if !self.style.has_headings {
            return String::new();
        }
        let unit = self.byte_unit().name();
        if !self.has_cpu() {
            return format!(
                "Recv   Send    Send                          \n\
                 Socket Socket  Message  Elapsed              \n\
                 Size   Size    Size     Time     Throughput  \n\
                 bytes  bytes   bytes    secs.    {unit}/sec  \n\n"
            );
        }
        let (ours, theirs) = if is_reverse { ("Recv", "Send") } else { ("Send", "Recv") };
        let (a, b) = self.letters();
        format!(
            "Recv   Send    Send                          Utilization       Service Demand\n\
             Socket Socket  Message  Elapsed              {ours}     {theirs}     {ours}    {theirs}\n\
             Size   Size    Size     Time     Throughput  local    remote   local   remote\n\
             bytes  bytes   bytes    secs.    {unit:<8}/s  % {a}      % {b}      us/KB   us/KB\n\n"
        )
    }

    fn stream_details(&self, is_reverse: bool) -> String {
        let last = &self.summary.last;
        let (ours, theirs) = if is_reverse { ("Recv", "Send") } else { ("Send", "Recv") };
        let (near, far) = (&last.local.tally, &last.remote.tally);
        let (near, far) = if is_reverse {
            ((near.bytes_received, near.recv_calls), (far.bytes_sent, far.send_calls))
        } else {
            ((near.bytes_sent, near.send_calls), (far.bytes_received, far.recv_calls))
        };
        let per = |(bytes, calls): (u64, u64)| bytes as f64 / calls.max(1) as f64;
        let mut text = format!(
            "\nAlignment      Offset         Bytes    Bytes       {ours}s   Bytes    {theirs}s\n\
             Local  Remote  Local  Remote  Xfered   Per                 Per\n\
             {ours}   {theirs}    {ours}   {theirs}             {ours} (avg)          {theirs} (avg)\n\
             {:5}   {:5}  {:5}   {:5} {:6}  {:6.2}    {:6}   {:6.2} {:6}\n",
            8,
            8,
            0,
            0,
            near.0,
            per(near),
            near.1,
            per(far),
            far.1
        );
        let mss = last.segment_bytes.map_or(-1, i64::from);
        let _ = write!(text, "\nMaximum\nSegment\nSize (bytes)\n{mss:6}\n");
        let _ = write!(text, "\n{}\n", self.ways());
        text
    }

    /// By which calls the bytes went in and came out.
    fn ways(&self) -> String {
        let sent = match self.options.test {
            Test::TcpSendfile => "from a file",
            _ if self.options.local_given => "by reference (-a)",
            _ => "by copy",
        };
        let received =
            if self.options.remote_posted { "into posted buffers (-A)" } else { "by copy" };
        format!("Sent {sent}, received {received}")
    }

    fn transaction_table(&self) -> String {
        let (s, last) = (self.summary, &self.summary.last);
        let (request, response) = self.options.exchange_bytes;
        let throughput = self.throughput();
        let ours = last.local.buffers.0;
        let mut text = self.transaction_headings();
        if self.has_cpu() {
            let _ = writeln!(
                text,
                "{:<6} {:<6} {request:<6}  {response:<6} {:<6.2}  {throughput:<6.2}  \
                 {:<6.2} {:<6.2} {:<6.3}  {:<6.3} ",
                ours.send,
                ours.recv,
                s.elapsed,
                s.cpu_percent.0,
                s.cpu_percent.1,
                s.service_demand.0,
                s.service_demand.1
            );
        } else {
            let _ = writeln!(
                text,
                "{:<6} {:<6} {request:<6}   {response:<6}  {:<6.2}   {throughput:7.2}   ",
                ours.send, ours.recv, s.elapsed
            );
        }
        let theirs = last.remote.buffers.0;
        let _ = writeln!(text, "{:<6} {:<6}", theirs.send, theirs.recv);
        if self.style.verbosity > 1 && !self.options.test.is_per_connection() {
            text.push_str(&self.transaction_details());
        }
        text
    }

    fn transaction_headings(&self) -> String {
        if !self.style.has_headings {
            return String::new();
        }
        let unit = self.byte_unit().name();
        let first = "Local /Remote\n";
        if !self.has_cpu() && self.is_in_transactions() {
            return format!(
                "{first}Socket Size   Request  Resp.   Elapsed  Trans.\n\
                 Send   Recv   Size     Size    Time     Rate         \n\
                 bytes  Bytes  bytes    bytes   secs.    per sec   \n\n"
            );
        }
        if !self.has_cpu() {
            return format!(
                "{first}Socket Size   Request  Resp.   Elapsed  \n\
                 Send   Recv   Size     Size    Time     Throughput \n\
                 bytes  Bytes  bytes    bytes   secs.    {unit}/sec   \n\n"
            );
        }
        // netperf's tables of connection tests do not tell the method.
        let (a, b) =
            if self.options.test.is_per_connection() { (' ', ' ') } else { self.letters() };
        let (what, how) =
            if self.is_in_transactions() { ("Trans.", "Rate") } else { ("Tput", unit) };
        format!(
            "{first}Socket Size   Request Resp.  Elapsed {what:<6}   CPU    CPU    S.dem   S.dem\n\
             Send   Recv   Size    Size   Time    {how:<8} local  remote local   remote\n\
             bytes  bytes  bytes   bytes  secs.   per sec  % {a}    % {b}    us/Tr   us/Tr\n\n"
        )
    }

    fn transaction_details(&self) -> String {
        let unit = self.byte_unit();
        let rate = self.summary.rate;
        let (request, response) = self.options.exchange_bytes;
        format!(
            "Alignment      Offset         RoundTrip  Trans    Throughput\n\
             Local  Remote  Local  Remote  Latency    Rate     {:<8}/s\n\
             Send   Recv    Send   Recv    usec/Tran  per sec  Outbound   Inbound\n\
             {:5}  {:5}   {:5}  {:5}   {:<6.3}   {rate:<6.3} {:<6.3}    {:<6.3}\n",
            unit.name(),
            8,
            0,
            0,
            0,
            self.round_trip_us(),
            unit.of(rate * request as f64),
            unit.of(rate * response as f64),
        )
    }

    /// µs per transaction; those ahead of their answers run beside each other.
    fn round_trip_us(&self) -> f64 {
        1e6 / self.summary.rate * f64::from(1 + self.options.burst)
    }

    fn datagram_table(&self) -> String {
        let (s, last) = (self.summary, &self.summary.last);
        let unit = self.byte_unit();
        let (near, far) = (&last.local.tally, &last.remote.tally);
        let sent = unit.of(near.bytes_sent as f64 / last.elapsed);
        let received = unit.of(s.rate);
        let (buffer, message) = (last.local.buffers.0.send, last.local.send_bytes);
        let (calls, errors, elapsed) = (near.send_calls, near.failed_sends, s.elapsed);
        let (theirs, taken) = (last.remote.buffers.0.recv, far.recv_calls);
        let mut text = self.datagram_headings();
        if self.has_cpu() {
            let (cpu, demand) = (s.cpu_percent, s.service_demand);
            let _ = write!(
                text,
                "{buffer:6}  {message:6}   {elapsed:<7.2}   {calls:7} {errors:6}    {sent:7.1}     \
                 {:<6.2}   {:<6.3}\n\
                 {theirs:6}           {elapsed:<7.2}   {taken:7}           {received:7.1}     \
                 {:<6.2}   {:<6.3}\n\n",
                cpu.0, demand.0, cpu.1, demand.1
            );
        } else {
            let _ = write!(
                text,
                "{buffer:6}  {message:6}   {elapsed:<7.2}   {calls:7} {errors:6}    {sent:7.2}\n\
                 {theirs:6}           {elapsed:<7.2}   {taken:7}           {received:7.2}\n\n"
            );
        }
        text
    }

    fn datagram_headings(&self) -> String {
        if !self.style.has_headings {
            return String::new();
        }
        let unit = self.byte_unit().name();
        if !self.has_cpu() {
            return format!(
                "Socket  Message  Elapsed      Messages                \n\
                 Size    Size     Time         Okay Errors   Throughput\n\
                 bytes   bytes    secs            #      #   {unit}/sec\n\n"
            );
        }
        let (a, b) = self.letters();
        format!(
            "Socket  Message  Elapsed      Messages                   CPU      Service\n\
             Size    Size     Time         Okay Errors   Throughput   Util     Demand\n\
             bytes   bytes    secs            #      #   {unit}/sec % {a}{b}     us/KB\n\n"
        )
    }

    /// All that netperf calls output selectors and we know, in the order of its list.
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let (s, last) = (self.summary, &self.summary.last);
        let is_rr = self.options.test.is_transactional();
        let unit = if self.is_in_transactions() { "Trans/s" } else { "" };
        let unit =
            if unit.is_empty() { format!("{}/s", self.byte_unit().name()) } else { unit.into() };
        let (letter, their_letter) = self.letters();
        let mut keys = vec![
            ("SOCKET_TYPE", if self.options.test.is_udp() { "Datagram" } else { "Stream" }.into()),
            ("PROTOCOL", if self.options.test.is_udp() { "UDP" } else { "TCP" }.into()),
            ("ELAPSED_TIME", format!("{:.2}", s.elapsed)),
            ("THROUGHPUT", format!("{:.2}", self.throughput())),
            ("THROUGHPUT_UNITS", unit),
            ("LSS_SIZE", last.local.buffers.0.send.to_string()),
            ("LSR_SIZE", last.local.buffers.0.recv.to_string()),
            ("LSS_SIZE_END", last.local.buffers.1.send.to_string()),
            ("LSR_SIZE_END", last.local.buffers.1.recv.to_string()),
            ("RSS_SIZE", last.remote.buffers.0.send.to_string()),
            ("RSR_SIZE", last.remote.buffers.0.recv.to_string()),
            ("RSS_SIZE_END", last.remote.buffers.1.send.to_string()),
            ("RSR_SIZE_END", last.remote.buffers.1.recv.to_string()),
            ("SD_UNITS", if is_rr { "usec/Tran" } else { "usec/KB" }.into()),
            ("LOCAL_CPU_METHOD", letter.into()),
            ("REMOTE_CPU_METHOD", their_letter.into()),
            ("LOCAL_SD", format!("{:.3}", s.service_demand.0)),
            ("REMOTE_SD", format!("{:.3}", s.service_demand.1)),
            ("TRANSPORT_MSS", last.segment_bytes.map_or(-1, i64::from).to_string()),
            ("CONFIDENCE_LEVEL", self.goal.level.percent().to_string()),
            ("CONFIDENCE_INTERVAL", format!("{:.6}", self.goal.width * 100.0)),
            ("CONFIDENCE_ITERATION", s.runs.to_string()),
            ("THROUGHPUT_CONFID", confidence(s.widths[0])),
            ("LOCAL_CPU_CONFID", confidence(s.widths[1])),
            ("REMOTE_CPU_CONFID", confidence(s.widths[2])),
        ];
        if is_rr {
            keys.push(("REQUEST_SIZE", self.options.exchange_bytes.0.to_string()));
            keys.push(("RESPONSE_SIZE", self.options.exchange_bytes.1.to_string()));
            keys.push(("TRANSACTION_RATE", format!("{:.3}", s.rate)));
            keys.push(("RT_LATENCY", format!("{:.3}", self.round_trip_us())));
            keys.push(("BURST_SIZE", self.options.burst.to_string()));
        }
        keys.extend(self.side_keys(true));
        keys.extend(self.side_keys(false));
        keys
    }

    fn side_keys(&self, is_local: bool) -> [(&'static str, String); 17] {
        let (s, last) = (self.summary, &self.summary.last);
        let (side, cpu) =
            if is_local { (&last.local, s.cpu_percent.0) } else { (&last.remote, s.cpu_percent.1) };
        let (t, u) = (&side.tally, &side.usage);
        let per = |bytes: u64, calls: u64| format!("{:.2}", bytes as f64 / calls.max(1) as f64);
        let two = |n: f64| format!("{n:.2}");
        let values = [
            two(cpu),
            two(u.user_percent),
            two(u.system_percent),
            two(u.iowait_percent),
            two(u.irq_percent),
            two(u.softirq_percent),
            two(u.peak.1),
            u.peak.0.to_string(),
            side.cpus.to_string(),
            side.send_bytes.to_string(),
            side.recv_bytes.to_string(),
            t.send_calls.to_string(),
            t.recv_calls.to_string(),
            per(t.bytes_sent, t.send_calls),
            per(t.bytes_received, t.recv_calls),
            (t.bytes_sent + t.bytes_received).to_string(),
            side.retransmits.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX)).to_string(),
        ];
        let names = if is_local { LOCAL_KEYS } else { REMOTE_KEYS };
        let mut values = values.into_iter();
        names.map(|name| (name, values.next().unwrap_or_default()))
    }
}

/// How sure, as netperf's key says it: the width of the interval in percent, -1 without one.
fn confidence(width: f64) -> String {
    if width.is_finite() { format!("{:.3}", width * 100.0) } else { "-1.000".into() }
}

const LOCAL_KEYS: [&str; 17] = [
    "LOCAL_CPU_UTIL",
    "LOCAL_CPU_PERCENT_USER",
    "LOCAL_CPU_PERCENT_SYSTEM",
    "LOCAL_CPU_PERCENT_IOWAIT",
    "LOCAL_CPU_PERCENT_IRQ",
    "LOCAL_CPU_PERCENT_SWINTR",
    "LOCAL_CPU_PEAK_UTIL",
    "LOCAL_CPU_PEAK_ID",
    "LOCAL_CPU_COUNT",
    "LOCAL_SEND_SIZE",
    "LOCAL_RECV_SIZE",
    "LOCAL_SEND_CALLS",
    "LOCAL_RECV_CALLS",
    "LOCAL_BYTES_PER_SEND",
    "LOCAL_BYTES_PER_RECV",
    "LOCAL_BYTES_XFERD",
    "LOCAL_TRANSPORT_RETRANS",
];
const REMOTE_KEYS: [&str; 17] = [
    "REMOTE_CPU_UTIL",
    "REMOTE_CPU_PERCENT_USER",
    "REMOTE_CPU_PERCENT_SYSTEM",
    "REMOTE_CPU_PERCENT_IOWAIT",
    "REMOTE_CPU_PERCENT_IRQ",
    "REMOTE_CPU_PERCENT_SWINTR",
    "REMOTE_CPU_PEAK_UTIL",
    "REMOTE_CPU_PEAK_ID",
    "REMOTE_CPU_COUNT",
    "REMOTE_SEND_SIZE",
    "REMOTE_RECV_SIZE",
    "REMOTE_SEND_CALLS",
    "REMOTE_RECV_CALLS",
    "REMOTE_BYTES_PER_SEND",
    "REMOTE_BYTES_PER_RECV",
    "REMOTE_BYTES_XFERD",
    "REMOTE_TRANSPORT_RETRANS",
];

/// The keys that are shown where the user names none.
pub const DEFAULT_KEYS: [&str; 22] = [
    "LSS_SIZE_END",
    "RSR_SIZE_END",
    "LOCAL_SEND_SIZE",
    "ELAPSED_TIME",
    "THROUGHPUT",
    "THROUGHPUT_UNITS",
    "LOCAL_CPU_UTIL",
    "LOCAL_CPU_PERCENT_USER",
    "LOCAL_CPU_PERCENT_SYSTEM",
    "LOCAL_CPU_PERCENT_IOWAIT",
    "LOCAL_CPU_PERCENT_IRQ",
    "LOCAL_CPU_PERCENT_SWINTR",
    "LOCAL_CPU_METHOD",
    "REMOTE_CPU_UTIL",
    "REMOTE_CPU_PERCENT_USER",
    "REMOTE_CPU_PERCENT_SYSTEM",
    "REMOTE_CPU_PERCENT_IOWAIT",
    "REMOTE_CPU_PERCENT_IRQ",
    "REMOTE_CPU_PERCENT_SWINTR",
    "REMOTE_CPU_METHOD",
    "LOCAL_SD",
    "REMOTE_SD",
];

#[cfg(test)]
mod tests;
