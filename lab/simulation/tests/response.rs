//! CUBIC under random losses beside the response function of RFC 9438 section 5: the mean window that a share of
//! losses allows.

use fulmar::internals::drivers::link::Impairments;
use fulmar_simulation::dumbbell::{Cell, Load, run};
use fulmar_stack::base::Duration;
use fulmar_stack::tcp::CongestionControl;

/// 100 ms and 200 Mb/s, which no window fills at these losses: `100ms-loss-0.1` of `bench wan`.
fn cell(loss: f64, seed: u64) -> Cell {
    Cell {
        name: format!("200 Mb/s, 100 ms, loss {} %", loss * 100.0),
        controllers: vec![CongestionControl::Cubic],
        load: Load::Bulk,
        path: Impairments {
            rate_bps: Some(200_000_000),
            queue_bytes: 2_500_000,
            delay: Duration::from_millis(50),
            loss,
            cut: 1.0,
            ..Impairments::default()
        },
        // Sixty seconds after the first quarter, in which slow start ends.
        time: Duration::from_secs(80),
        seed,
    }
}

/// Goodput of each of the first `seeds` seeds, Mb/s, in order.
fn goodputs(loss: f64, seeds: u64) -> Vec<f64> {
    let of = |seed| run(&cell(loss, seed)).goodput_bps[0] as f64 / 1e6;
    let mut all: Vec<f64> = (1..=seeds).map(of).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len() as f64
}

/// Goodput of the mean window of RFC 9438 section 5.1, or of its Reno-friendly region (section 4.3) where that is
/// larger, with segments of 1448 bytes, Mb/s.
fn response_mbps(loss: f64, rtt_s: f64) -> f64 {
    let (c, beta, alpha) = (0.4_f64, 0.7, 9.0 / 17.0);
    let cubic = (c * (3.0 + beta) / (4.0 * (1.0 - beta)) * (rtt_s / loss).powi(3)).powf(0.25);
    let reno = (alpha * (1.0 + beta) / (2.0 * (1.0 - beta) * loss)).sqrt();
    cubic.max(reno) * 1448.0 * 8.0 / rtt_s / 1e6
}

#[test]
fn the_mean_window_of_cubic_is_that_of_the_response_function() {
    for loss in [0.001, 0.01] {
        let (found, expected) = (mean(&goodputs(loss, 6)), response_mbps(loss, 0.1));
        assert!((0.85..1.5).contains(&(found / expected)), "{found} and {expected} Mb/s at {loss}");
    }
}

#[test]
#[ignore = "prints figures"]
fn the_response_to_losses_is_printed() {
    for loss in [0.0001, 0.001, 0.01] {
        let all = goodputs(loss, 200);
        let at = |percent: usize| all[(all.len() - 1) * percent / 100];
        println!(
            "loss {loss}: mean {:.2}, p5 {:.2}, median {:.2}, p95 {:.2}, response {:.2} Mb/s",
            mean(&all),
            at(5),
            at(50),
            at(95),
            response_mbps(loss, 0.1)
        );
    }
}
