//! Direct placement: a device writes received payload into the buffers that a reader has posted
//! ([`ZeroCopy::recv_posted`](crate::zero_copy::ZeroCopy::recv_posted)), without a copy by the stack.
//!
//! A device implements [`DirectPlacement`] and returns itself from
//! [`Device::placement`](crate::device::Device::placement). The page `docs/placement.md` of the repository has the
//! rules.

/// A sequence number, as a device finds it in the headers.
///
/// ```
/// use fulmar::device::placement::SeqNum;
///
/// let (next, arrived) = (SeqNum(u32::MAX - 99), SeqNum(100));
/// assert!(next.before(arrived));
/// assert_eq!(arrived.since(next), 200);
/// ```
pub use fulmar_stack::base::SeqNum;
/// The calls with which a stack posts buffers.
///
/// ```
/// use fulmar::device::FlowKey;
/// use fulmar::device::placement::{DirectPlacement, SeqNum, Unsupported, WritableRanges};
///
/// /// Places one flow at a time.
/// #[derive(Default)]
/// struct Placer(Option<(FlowKey, SeqNum, WritableRanges)>);
///
/// impl DirectPlacement for Placer {
///     fn place(&mut self, flow: FlowKey, next: SeqNum, ranges: WritableRanges) -> Result<(), Unsupported> {
///         if self.0.as_ref().is_some_and(|(placed, ..)| *placed != flow) {
///             return Err(Unsupported);
///         }
///         self.0 = Some((flow, next, ranges));
///         Ok(())
///     }
///     fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
///         let placed = self.0.take_if(|(placed, ..)| placed == flow);
///         placed.map(|(_, _, ranges)| ranges).unwrap_or_default()
///     }
/// }
/// # let flow = FlowKey::new("10.0.0.2:80".parse().unwrap(), "10.0.0.1:4000".parse().unwrap());
/// # let mut placer = Placer::default();
/// # assert_eq!(placer.place(flow, SeqNum(1), WritableRanges::default()), Ok(()));
/// # assert!(placer.revoke(&flow).is_empty());
/// ```
pub use fulmar_stack::device::DirectPlacement;
/// A device does not place a flow: the stack copies its payload.
///
/// ```
/// use fulmar::device::FlowKey;
/// use fulmar::device::placement::{DirectPlacement, SeqNum, Unsupported, WritableRanges};
///
/// fn post(device: &mut dyn DirectPlacement, flow: FlowKey, next: SeqNum, to: WritableRanges) {
///     match device.place(flow, next, to) {
///         Ok(()) => println!("the device writes the payload"),
///         Err(Unsupported) => println!("the stack copies the payload"),
///     }
/// }
/// ```
pub use fulmar_stack::device::Unsupported;
/// The ranges of a flow.
///
/// ```
/// use fulmar::device::placement::WritableRanges;
/// use fulmar::zero_copy::RecvBuf;
///
/// let mut buffer = RecvBuf::with_capacity(4096).post();
/// let mut ranges = WritableRanges::default();
/// let range = buffer.writable_range(0).expect("nothing else writes to the buffer");
/// ranges.push(range).expect("there are two places");
/// assert_eq!((ranges.len(), ranges.bytes()), (1, 4096));
/// ```
pub use fulmar_stack::device::WritableRanges;
/// The identity of a buffer, by which a device finds its registration again.
///
/// ```
/// use std::collections::HashMap;
/// use fulmar::device::placement::BufId;
/// use fulmar::zero_copy::RecvBuf;
///
/// /// A key of the hardware for each registered buffer.
/// let mut keys: HashMap<BufId, u32> = HashMap::new();
/// let buffer = RecvBuf::with_capacity(4096);
/// keys.insert(buffer.id(), 7);
/// assert_eq!(keys.get(&buffer.id()), Some(&7));
/// ```
pub use fulmar_stack::mbuf::BufId;
/// The memory that a device fills.
///
/// ```
/// use fulmar::zero_copy::RecvBuf;
///
/// let mut posted = RecvBuf::with_capacity(4096).post();
/// let mut range = posted.writable_range(0).expect("nothing else writes to the buffer");
/// assert_eq!(range.write(b"hello"), 5);
/// assert_eq!((range.offset(), range.len()), (5, 4091));
/// drop(range);
/// let filled = posted.release(5).expect("the device has ended");
/// assert_eq!(&*filled, b"hello");
/// ```
pub use fulmar_stack::mbuf::WritableRange;
