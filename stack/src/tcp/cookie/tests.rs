use super::*;
use crate::base::FlowKey;
use crate::mbuf::{Chain, Pool, PoolConfig};
use crate::tcp::Tcb;
use crate::tcp::contract::{EcnField, Env, Events, State};
use proptest::prelude::*;

const BASE: u32 = 0xfedc_ba98;
const OFFSET: u32 = 0xffff_fff0;
const HASHES: CookieHashes = CookieHashes { base: BASE, ts_offset: OFFSET };
const PATH: PathInfo =
    PathInfo { mtu: 1500, route_mtu: 1500, ip_header_bytes: 20, tso_bytes: None };
const BUDGET: WindowBudget = WindowBudget::new(1 << 30);

/// A cheap hash that every input bit changes; the tests run it fifty million times.
fn mac(input: &CookieInput) -> u32 {
    let words = [input.peer_iss.0, input.period, input.options];
    let mix =
        |h: u64, w: u32| (h ^ u64::from(w)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (words.into_iter().fold(7, mix) >> 16) as u32
}

fn syn(options: Options) -> Header {
    let flags = Flags::SYN;
    Header { src_port: 4000, dst_port: 80, seq: SeqNum(77), flags, options, ..Header::default() }
}

fn all_options() -> Options {
    Options {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: 5, echo: 0 }),
        ..Options::default()
    }
}

fn answer(cfg: &Config, syn: &Header, now: Instant) -> Header {
    cookie_syn_ack(cfg, &PATH, &BUDGET, plain(syn), now, HASHES, mac)
}

fn plain(header: &Header) -> Syn<'_> {
    Syn { header, ecn: EcnField::NotEct }
}

/// The ACK that answers a SYN,ACK.
fn ack_of(syn: &Header, syn_ack: &Header) -> Header {
    let timestamps =
        syn_ack.options.timestamps.map(|t| Timestamps { value: t.echo + 1, echo: t.value });
    Header {
        src_port: syn.src_port,
        dst_port: syn.dst_port,
        seq: SeqNum(syn.seq.0.wrapping_add(1)),
        ack: SeqNum(syn_ack.seq.0.wrapping_add(1)),
        flags: Flags::ACK,
        window: 500,
        options: Options { timestamps, ..Options::default() },
        ..Header::default()
    }
}

fn check(ack: &Header, now: Instant) -> CookieVerdict {
    check_cookie(&Config::default(), IpVersion::V4, ack, now, BASE, mac)
}

fn at(secs: u64) -> Instant {
    Instant::from_millis(secs * 1000)
}

fn options() -> impl Strategy<Value = Options> {
    let timestamps = proptest::option::of(any::<(u32, u32)>());
    let shift = proptest::option::of(any::<u8>());
    (proptest::option::of(any::<u16>()), shift, any::<bool>(), timestamps).prop_map(
        |(mss, window_scale, sack_permitted, t)| Options {
            mss,
            window_scale,
            sack_permitted,
            timestamps: t.map(|(value, echo)| Timestamps { value, echo }),
            ..Options::default()
        },
    )
}

proptest! {
    #[test]
    fn a_cookie_restores_the_options_that_its_syn_ack_accepted(
        options in options(),
        (iss, ms, base) in any::<(u32, u32, u32)>(),
        is_v6: bool,
        asks in proptest::sample::select(&[0u8, 3, 7]),
        later in 0u64..64_000,
    ) {
        let cfg = Config::default();
        let path = PathInfo { ip_header_bytes: if is_v6 { 40 } else { 20 }, ..PATH };
        let version = path.ip_version();
        let mut syn = Header { seq: SeqNum(iss), ..syn(options) };
        syn.flags |= Flags::of_ace(asks);
        let now = Instant::from_millis(ms.into());
        let reply = cookie_syn_ack(&cfg, &path, &BUDGET, plain(&syn), now, CookieHashes { base, ts_offset: OFFSET }, mac);
        let mut ack = ack_of(&syn, &reply);
        if asks == 7 {
            ack.flags |= Flags::of_ace(2);
        }
        let then = now + Duration::from_millis(later);
        let CookieVerdict::Valid(back) = check_cookie(&cfg, version, &ack, then, base, mac) else {
            panic!("not valid");
        };
        let got = back.options;
        prop_assert_eq!(back.seq, SeqNum(iss));
        let theirs = options.mss.unwrap_or(0);
        let mss = got.mss.unwrap();
        prop_assert!(mss <= theirs || mss == mss_table(version)[0]);
        prop_assert!(mss_table(version).iter().all(|m| *m <= mss || *m > theirs));
        let carried = options.timestamps.is_some();
        let scale = options.window_scale.filter(|_| carried).map(|s| s.min(14));
        prop_assert_eq!(got.window_scale, scale);
        prop_assert_eq!(reply.options.window_scale.is_some(), scale.is_some());
        prop_assert_eq!(got.sack_permitted, options.sack_permitted && carried);
        prop_assert_eq!(reply.options.sack_permitted, got.sack_permitted);
        prop_assert_eq!(got.timestamps.is_some(), carried);
        let (restored, answer) = match asks {
            7 => (7, 2),
            3 if carried => (3, 1),
            _ => (0, 0),
        };
        prop_assert_eq!((back.flags.ace(), reply.flags.ace()), (restored, answer));
    }

    #[test]
    fn our_timestamp_is_at_most_64_ms_behind_the_clock_and_never_ahead(
        options in options(), ms: u32,
    ) {
        let now = Instant::from_millis(ms.into());
        let reply = answer(&Config::default(), &syn(options), now);
        if let Some(t) = reply.options.timestamps {
            prop_assert!(ms.wrapping_add(OFFSET).wrapping_sub(t.value) < 64);
        }
    }
}

#[test]
fn a_flipped_bit_in_the_ack_invalidates_the_cookie() {
    let syn = syn(all_options());
    let good = ack_of(&syn, &answer(&Config::default(), &syn, at(1000)));
    assert!(matches!(check(&good, at(1000)), CookieVerdict::Valid(_)));
    let is_valid = |ack: Header| matches!(check(&ack, at(1000)), CookieVerdict::Valid(_));
    let mut wrong_mss = 0;
    for bit in 0..32 {
        let flip = |n: SeqNum| SeqNum(n.0 ^ 1 << bit);
        assert!(!is_valid(Header { seq: flip(good.seq), ..good }), "bit {bit} of the number");
        // Two bits of the acknowledgement number hold the MSS index, which may carry into a third.
        wrong_mss += u32::from(is_valid(Header { ack: flip(good.ack), ..good }));
    }
    assert!(wrong_mss <= 2, "{wrong_mss} flipped bits of the acknowledgement pass");
    for bit in 0..6 {
        let mut t = good.options.timestamps.unwrap();
        t.echo ^= 1 << bit;
        let options = Options { timestamps: Some(t), ..good.options };
        assert!(!is_valid(Header { options, ..good }), "bit {bit} of the echo");
    }
    let options = Options { timestamps: None, ..good.options };
    assert!(!is_valid(Header { options, ..good }), "without timestamps");
}

#[test]
fn eight_of_all_acknowledgement_numbers_are_valid_in_two_periods() {
    let syn = syn(all_options());
    let good = ack_of(&syn, &answer(&Config::default(), &syn, at(1000)));
    // Every tag of both valid periods, and of the one before them.
    let period = period_of(at(1000));
    let mut valid = 0;
    for age in 0..3 {
        for tag in 0..=TAG_MASK {
            let offset = period.wrapping_sub(age) << PERIOD_SHIFT | tag;
            let ack = SeqNum(BASE.wrapping_add(offset).wrapping_add(1));
            let verdict = check(&Header { ack, ..good }, at(1000));
            valid += u32::from(matches!(verdict, CookieVerdict::Valid(_)));
            assert!(age < 2 || verdict == CookieVerdict::Forged);
        }
    }
    assert_eq!(valid, 8);
}

#[test]
fn a_cookie_is_valid_in_its_period_and_the_next() {
    let syn = syn(all_options());
    // The middle of a period.
    let ack = ack_of(&syn, &answer(&Config::default(), &syn, at(64 * 100 + 32)));
    for (secs, is_good) in [(0, true), (31, true), (95, true), (96, false), (200, false)] {
        let verdict = check(&ack, at(64 * 100 + 32 + secs));
        assert_eq!(matches!(verdict, CookieVerdict::Valid(_)), is_good, "after {secs} s");
    }
    assert!(check(&ack, at(64 * 99 + 63)) == CookieVerdict::Forged, "from the future");
}

#[test]
fn the_initial_sequence_numbers_of_a_flow_grow_with_time() {
    let syn = syn(all_options());
    let cookie = |secs| answer(&Config::default(), &syn, at(secs)).seq;
    for secs in (0..2000).step_by(64) {
        assert!(cookie(secs + 128).after(cookie(secs)), "at {secs} s");
    }
}

#[test]
fn data_after_a_lost_handshake_ack_is_distinguished_from_a_forgery() {
    let syn = syn(all_options());
    let good = ack_of(&syn, &answer(&Config::default(), &syn, at(1000)));
    let behind = Header { seq: SeqNum(good.seq.0 + 1448), ..good };
    assert_eq!(check(&behind, at(1000)), CookieVerdict::NotHandshake);
    let stranger = Header { ack: SeqNum(good.ack.0 ^ 0x4000_0000), ..good };
    assert_eq!(check(&stranger, at(1000)), CookieVerdict::Forged);
}

#[test]
fn a_cookie_offers_an_initial_window_or_beyond_the_limit_a_page() {
    let budget = WindowBudget { limit_bytes: 10, granted_bytes: 20 };
    let reply = cookie_syn_ack(
        &Config::default(),
        &PATH,
        &budget,
        plain(&syn(all_options())),
        at(1),
        HASHES,
        mac,
    );
    assert_eq!(reply.window, 4096);
    assert_eq!(answer(&Config::default(), &syn(all_options()), at(1)).window, 14_600);
}

#[test]
fn a_connection_from_a_cookie_matches_the_peers_state() {
    let mut pool = Pool::new(PoolConfig::default()).unwrap();
    let mut counters = crate::base::Counters::default();
    let mut window = BUDGET;
    let key = FlowKey::new("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
    let cfg = Config::default();
    let syn = syn(all_options());
    let reply = answer(&cfg, &syn, at(1000));
    let ack = Header { flags: Flags::ACK | Flags::FIN, ..ack_of(&syn, &reply) };
    let CookieVerdict::Valid(seen) = check(&ack, at(1001)) else { panic!("not valid") };
    let mut env =
        Env { now: at(1001), pool: &mut pool, counters: &mut counters, window: &mut window };
    let mut tcb = Tcb::from_cookie(&cfg, key, OFFSET, PATH, &mut env, &seen, &ack);
    assert!(!tcb.wants_output(), "a SYN,ACK is retransmitted");
    let mut payload = Chain::new();
    payload.push_back({
        let mut m = env.pool.alloc(3, 0, crate::mbuf::Purpose::Receive).unwrap();
        m.append(3).unwrap().copy_from_slice(b"GET");
        m
    });
    let events = tcb.input(&mut env, &ack, EcnField::NotEct, payload);
    assert!(events.contains(Events::CONNECTED | Events::READABLE | Events::PEER_CLOSED));
    assert_eq!(tcb.state(), State::CloseWait);
    assert_eq!((tcb.scale.snd, tcb.scale.rcv), (7, cfg.window_scale()));
    assert_eq!((tcb.snd.wnd, tcb.mss), (500 << 7, 1448));
    assert!(tcb.sack_on && tcb.ts.on);
    assert_eq!(tcb.rtt.srtt(), Duration::ZERO, "nothing was timed");
    tcb.release(&mut env);
    assert_eq!((pool.outstanding(), window.granted_bytes), (0, 0));
}
