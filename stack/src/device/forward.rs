//! Forwards the methods of [`Device`](crate::device::Device) that a wrapper does not implement itself.

/// Implements the methods of [`Device`](crate::device::Device) by calling the inner device, all but those named after
/// `except`, in the order of the trait:
///
/// ```
/// # use fulmar_stack::device::{Caps, Device, DeviceStats, forward_device};
/// /// Shows another name.
/// struct Named<D>(D);
///
/// impl<D: Device> Device for Named<D> {
///     forward_device!(self => self.0, except stats);
///
///     fn stats(&self) -> DeviceStats {
///         DeviceStats { name: "mine".into(), ..self.0.stats() }
///     }
/// }
/// ```
///
/// A name that is not a method of the trait, or is out of order, does not compile. A method added to the trait later is
/// forwarded. A wrapper that reads or times frames gives its own `caps`
/// ([`Caps::exact_time`](crate::device::Caps::exact_time)), and one that drops, delays or changes received frames its
/// own `placement`: `None`, since a frame that it drops would have been placed already.
#[macro_export]
macro_rules! forward_device {
    ($this:ident => $inner:expr) => {
        $crate::forward_device!(@caps $this ($inner));
    };
    ($this:ident => $inner:expr, except $($own:ident),+ $(,)?) => {
        $crate::forward_device!(@caps $this ($inner) $($own)+);
    };
    (@caps $this:ident $inner:tt caps $($own:ident)*) => {
        $crate::forward_device!(@attach $this $inner $($own)*);
    };
    (@caps $this:ident $inner:tt $($own:ident)*) => {
        fn caps(&$this) -> &$crate::device::Caps {
            $inner.caps()
        }
        $crate::forward_device!(@attach $this $inner $($own)*);
    };
    (@attach $this:ident $inner:tt attach $($own:ident)*) => {
        $crate::forward_device!(@tx_burst $this $inner $($own)*);
    };
    (@attach $this:ident $inner:tt $($own:ident)*) => {
        fn attach(
            &mut $this,
            owner: &$crate::base::OwnerKey,
        ) -> $crate::device::Attachment {
            $inner.attach(owner)
        }
        $crate::forward_device!(@tx_burst $this $inner $($own)*);
    };
    (@tx_burst $this:ident $inner:tt tx_burst $($own:ident)*) => {
        $crate::forward_device!(@tx_reap $this $inner $($own)*);
    };
    (@tx_burst $this:ident $inner:tt $($own:ident)*) => {
        fn tx_burst(
            &mut $this,
            now: $crate::base::Instant,
            pool: &mut $crate::mbuf::Pool,
            burst: &mut $crate::device::Burst,
            counters: &mut $crate::base::Counters,
        ) -> usize {
            $inner.tx_burst(now, pool, burst, counters)
        }
        $crate::forward_device!(@tx_reap $this $inner $($own)*);
    };
    (@tx_reap $this:ident $inner:tt tx_reap $($own:ident)*) => {
        $crate::forward_device!(@rx_burst $this $inner $($own)*);
    };
    (@tx_reap $this:ident $inner:tt $($own:ident)*) => {
        fn tx_reap(
            &mut $this,
            now: $crate::base::Instant,
            pool: &mut $crate::mbuf::Pool,
        ) -> usize {
            $inner.tx_reap(now, pool)
        }
        $crate::forward_device!(@rx_burst $this $inner $($own)*);
    };
    (@rx_burst $this:ident $inner:tt rx_burst $($own:ident)*) => {
        $crate::forward_device!(@arm $this $inner $($own)*);
    };
    (@rx_burst $this:ident $inner:tt $($own:ident)*) => {
        fn rx_burst(
            &mut $this,
            now: $crate::base::Instant,
            pool: &mut $crate::mbuf::Pool,
            out: &mut $crate::device::Burst,
            budget: usize,
            counters: &mut $crate::base::Counters,
        ) -> usize {
            $inner.rx_burst(now, pool, out, budget, counters)
        }
        $crate::forward_device!(@arm $this $inner $($own)*);
    };
    (@arm $this:ident $inner:tt arm $($own:ident)*) => {
        $crate::forward_device!(@disarm $this $inner $($own)*);
    };
    (@arm $this:ident $inner:tt $($own:ident)*) => {
        fn arm(&mut $this) -> bool {
            $inner.arm()
        }
        $crate::forward_device!(@disarm $this $inner $($own)*);
    };
    (@disarm $this:ident $inner:tt disarm $($own:ident)*) => {
        $crate::forward_device!(@wake_fd $this $inner $($own)*);
    };
    (@disarm $this:ident $inner:tt $($own:ident)*) => {
        fn disarm(&mut $this) {
            $inner.disarm()
        }
        $crate::forward_device!(@wake_fd $this $inner $($own)*);
    };
    (@wake_fd $this:ident $inner:tt wake_fd $($own:ident)*) => {
        $crate::forward_device!(@next_deadline $this $inner $($own)*);
    };
    (@wake_fd $this:ident $inner:tt $($own:ident)*) => {
        fn wake_fd(&$this) -> Option<$crate::device::WakeFd> {
            $inner.wake_fd()
        }
        $crate::forward_device!(@next_deadline $this $inner $($own)*);
    };
    (@next_deadline $this:ident $inner:tt next_deadline $($own:ident)*) => {
        $crate::forward_device!(@lost $this $inner $($own)*);
    };
    (@next_deadline $this:ident $inner:tt $($own:ident)*) => {
        fn next_deadline(&$this) -> Option<$crate::base::Instant> {
            $inner.next_deadline()
        }
        $crate::forward_device!(@lost $this $inner $($own)*);
    };
    (@lost $this:ident $inner:tt lost $($own:ident)*) => {
        $crate::forward_device!(@coalesce $this $inner $($own)*);
    };
    (@lost $this:ident $inner:tt $($own:ident)*) => {
        fn lost(&$this) -> Option<i32> {
            $inner.lost()
        }
        $crate::forward_device!(@coalesce $this $inner $($own)*);
    };
    (@coalesce $this:ident $inner:tt coalesce $($own:ident)*) => {
        $crate::forward_device!(@placement $this $inner $($own)*);
    };
    (@coalesce $this:ident $inner:tt $($own:ident)*) => {
        fn coalesce(&mut $this, to: Option<$crate::device::moderation::Profile>) {
            $inner.coalesce(to)
        }
        $crate::forward_device!(@placement $this $inner $($own)*);
    };
    (@placement $this:ident $inner:tt placement $($own:ident)*) => {
        $crate::forward_device!(@stats $this $inner $($own)*);
    };
    (@placement $this:ident $inner:tt $($own:ident)*) => {
        fn placement(&mut $this) -> Option<&mut dyn $crate::device::DirectPlacement> {
            $inner.placement()
        }
        $crate::forward_device!(@stats $this $inner $($own)*);
    };
    (@stats $this:ident $inner:tt stats $($own:ident)*) => {
        $crate::forward_device!(@end $this $inner $($own)*);
    };
    (@stats $this:ident $inner:tt $($own:ident)*) => {
        fn stats(&$this) -> $crate::device::DeviceStats {
            $inner.stats()
        }
        $crate::forward_device!(@end $this $inner $($own)*);
    };
    (@end $this:ident $inner:tt) => {};
    (@end $this:ident $inner:tt $($own:ident)+) => {
        compile_error!(concat!(
            "no method of Device, or not in the order of the trait: ",
            $(stringify!($own), " ",)+
        ));
    };
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use crate::base::{Counters, EtherAddr, Instant, OwnerKey};
    use crate::mbuf::Pool;

    use crate::device::impair::Impairments;
    use crate::device::impaired::Impaired;
    use crate::device::moderation::Profile;
    use crate::device::pcap::PcapWriter;
    use crate::device::testing::{Mirror, place, pool};
    use crate::device::{
        Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, TxTime, WakeFd,
    };

    /// Notes the calls that reach it.
    struct Noting {
        caps: Caps,
        calls: Mutex<Vec<&'static str>>,
        placing: Mirror,
    }

    impl Noting {
        fn new(caps: Caps) -> Noting {
            Noting { caps, calls: Mutex::default(), placing: Mirror::new() }
        }

        fn note(&self, call: &'static str) {
            self.calls.lock().unwrap().push(call);
        }
    }

    #[deny(clippy::missing_trait_methods)]
    impl Device for Noting {
        fn caps(&self) -> &Caps {
            self.note("caps");
            &self.caps
        }
        fn attach(&mut self, _: &OwnerKey) -> Attachment {
            self.note("attach");
            Attachment::default()
        }
        fn tx_burst(&mut self, _: Instant, _: &mut Pool, _: &mut Burst, _: &mut Counters) -> usize {
            self.note("tx_burst");
            1
        }
        fn tx_reap(&mut self, _: Instant, _: &mut Pool) -> usize {
            self.note("tx_reap");
            2
        }
        fn rx_burst(
            &mut self,
            _: Instant,
            _: &mut Pool,
            _: &mut Burst,
            budget: usize,
            _: &mut Counters,
        ) -> usize {
            self.note("rx_burst");
            budget
        }
        fn arm(&mut self) -> bool {
            self.note("arm");
            false
        }
        fn disarm(&mut self) {
            self.note("disarm");
        }
        fn wake_fd(&self) -> Option<WakeFd> {
            self.note("wake_fd");
            Some(WakeFd::readable(4))
        }
        fn next_deadline(&self) -> Option<Instant> {
            self.note("next_deadline");
            Some(Instant::from_millis(5))
        }
        fn lost(&self) -> Option<i32> {
            self.note("lost");
            Some(6)
        }
        fn coalesce(&mut self, to: Option<Profile>) {
            assert!(to.is_none());
            self.note("coalesce");
        }
        fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
            self.note("placement");
            self.placing.placement()
        }
        fn stats(&self) -> DeviceStats {
            self.note("stats");
            DeviceStats { wakes: 7, ..DeviceStats::default() }
        }
    }

    struct Forwarding(Noting);

    #[deny(clippy::missing_trait_methods)]
    impl Device for Forwarding {
        forward_device!(self => self.0);
    }

    #[test]
    fn a_wrapper_forwards_every_method_with_its_arguments_and_its_answer() {
        let caps = Caps::plain(1400, EtherAddr([2, 0, 0, 0, 0, 1]));
        let mut device = Forwarding(Noting::new(caps));
        let (mut pool, mut burst) = (pool(), Burst::with_capacity(1));
        let (now, counters) = (Instant::ZERO, &mut Counters::default());
        assert_eq!(*device.caps(), caps);
        assert!(device.attach(&OwnerKey::new([0; OwnerKey::WORDS])).region.is_none());
        assert_eq!(device.tx_burst(now, &mut pool, &mut burst, counters), 1);
        assert_eq!(device.tx_reap(now, &mut pool), 2);
        assert_eq!(device.rx_burst(now, &mut pool, &mut burst, 3, counters), 3);
        assert!(!device.arm());
        device.disarm();
        assert_eq!(device.wake_fd(), Some(WakeFd::readable(4)));
        assert_eq!(device.next_deadline(), Some(Instant::from_millis(5)));
        assert_eq!(device.lost(), Some(6));
        device.coalesce(None);
        assert_eq!(place(&mut device, 10), Some(Ok(())));
        assert_eq!(device.stats().wakes, 7);
        let reached = device.0.calls.into_inner().unwrap();
        let in_order = [
            "caps",
            "attach",
            "tx_burst",
            "tx_reap",
            "rx_burst",
            "arm",
            "disarm",
            "wake_fd",
            "next_deadline",
            "lost",
            "coalesce",
            "placement",
            "stats",
        ];
        assert_eq!(reached, in_order);
    }

    #[test]
    fn wrappers_that_time_frames_ask_for_exact_time() {
        let behind = || {
            let plain = Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1]));
            Noting::new(Caps { tx_time: TxTime::Coarse, places_on_receive: true, ..plain })
        };
        let is_exact = |caps: &Caps| caps.tx_time == TxTime::Exact;
        let rates = Impairments::default;
        let faults = Impaired::new(behind(), 1, &rates(), &rates());
        assert!(is_exact(faults.caps()) && !faults.caps().places_on_receive);
        let pcap = PcapWriter::new(behind(), std::io::sink(), Default::default());
        assert!(is_exact(pcap.caps()) && pcap.caps().places_on_receive);
    }
}
