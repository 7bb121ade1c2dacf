//! Real data over a bad network: loss, reordering, duplicates, flipped bits.

use std::net;

use fulmar::TcpStream;
use fulmar::devices::Impairments;

use crate::support::buffers_come_home_but;
use crate::tcp::exchange;
use crate::{KERNEL, KERNEL6, POSTED, in_namespace, stack_with_faults};

const LEN: usize = 3 << 20;

fn bytes_survive(rates: &Impairments) {
    for (seed, address) in [(1, KERNEL), (2, KERNEL6)] {
        let stack = stack_with_faults(seed, rates);
        let listener = net::TcpListener::bind((address, 80)).unwrap();
        let c = TcpStream::connect(&stack, (address, 80)).unwrap();
        let (s, _) = listener.accept().unwrap();
        exchange(
            (c.try_clone().unwrap(), c.try_clone().unwrap()),
            (s.try_clone().unwrap(), s.try_clone().unwrap()),
            LEN,
        );
        drop((c, s));
        buffers_come_home_but(POSTED, &[&stack]);
    }
}

#[test]
fn every_byte_survives_loss_reordering_duplicates_and_flipped_bits() {
    in_namespace!(|| {
        bytes_survive(&Impairments {
            loss: 0.01,
            reorder: 0.02,
            reorder_pkts: 4,
            cut: 1.0,
            duplicate: 0.02,
            corrupt: 0.005,
            ..Impairments::default()
        });
    });
}
