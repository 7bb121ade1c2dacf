//! loom's atomics, with the orders that they lack.
//!
//! **`SeqCst`.** loom implements it for fences only and treats it as `AcqRel` everywhere else. The total order of such
//! accesses is equivalent to a fence between every two of them in a thread, and no fence between one of them and
//! another access. loom cannot express the second part, so each model runs twice: with a fence before each access, and
//! with a fence after it. An order that one run forbids in excess is tried by the other.
//!
//! **Stores** are exchanges here. loom does not know that an exchange reads the value that it overwrites, and would let
//! a store be older than the store that it overwrites (`loom` issue 254).
//!
//! **Loads.** loom remembers only the last access to an atomic when it chooses the next order, so a load hides earlier
//! accesses, and orders are left out (`loom` issues 166 and 392). Each access here follows a relaxed exchange on a
//! second atomic, which loom does track; the loaded value may still be old. Release and acquire fences would
//! synchronise through that exchange: code that uses such fences, and not `SeqCst` fences, uses loom's own atomics.

use std::cell::Cell;
pub use std::sync::atomic::Ordering;

pub use loom::sync::atomic::fence;

thread_local! {
    static IS_FENCE_FIRST: Cell<bool> = const { Cell::new(false) };
}

/// On which side of accesses the models of this test have their fences.
pub(crate) fn set_fence_first(is_first: bool) {
    IS_FENCE_FIRST.set(is_first);
}

/// The atomic beside an atomic.
#[derive(Debug, Default)]
struct Order(loom::sync::atomic::AtomicUsize);

impl Order {
    fn new() -> Order {
        Order::default()
    }

    fn access<T>(&self, by: Ordering, instead: Ordering, access: impl FnOnce(Ordering) -> T) -> T {
        self.0.swap(0, Ordering::Relaxed);
        if by != Ordering::SeqCst {
            return access(by);
        }
        if IS_FENCE_FIRST.get() {
            fence(Ordering::SeqCst);
            return access(instead);
        }
        let done = access(instead);
        fence(Ordering::SeqCst);
        done
    }
}

/// What orders a failed exchange.
fn of_failure(by: Ordering) -> Ordering {
    if by == Ordering::SeqCst { Ordering::Acquire } else { by }
}

macro_rules! accesses {
    ($value:ty) => {
        /// As of std.
        pub fn load(&self, by: Ordering) -> $value {
            self.order.access(by, Ordering::Acquire, |by| self.value.load(by))
        }

        /// As of std.
        pub fn store(&self, value: $value, by: Ordering) {
            self.order.access(by, Ordering::Release, |by| self.value.swap(value, by));
        }

        /// As of std.
        pub fn swap(&self, value: $value, by: Ordering) -> $value {
            self.order.access(by, Ordering::AcqRel, |by| self.value.swap(value, by))
        }

        /// As of std.
        ///
        /// # Errors
        /// As there.
        pub fn compare_exchange(
            &self,
            from: $value,
            to: $value,
            by: Ordering,
            failed: Ordering,
        ) -> Result<$value, $value> {
            let failed = of_failure(failed);
            let swap = |by| self.value.compare_exchange(from, to, by, failed);
            self.order.access(by, Ordering::AcqRel, swap)
        }

        /// As of std, but that it fails for good reasons only.
        ///
        /// # Errors
        /// As there.
        pub fn compare_exchange_weak(
            &self,
            from: $value,
            to: $value,
            by: Ordering,
            failed: Ordering,
        ) -> Result<$value, $value> {
            self.compare_exchange(from, to, by, failed)
        }
    };
}

macro_rules! atomics {
    ($($name:ident: $value:ty),*) => {$(
        /// As of std.
        #[derive(Debug, Default)]
        pub struct $name {
            value: loom::sync::atomic::$name,
            order: Order,
        }

        impl $name {
            /// As in std, but not a const function.
            pub fn new(value: $value) -> Self {
                $name { value: loom::sync::atomic::$name::new(value), order: Order::new() }
            }

            accesses!($value);

            /// As of std.
            pub fn fetch_or(&self, value: $value, by: Ordering) -> $value {
                self.order.access(by, Ordering::AcqRel, |by| self.value.fetch_or(value, by))
            }
        }
    )*};
}

macro_rules! counts {
    ($($name:ident: $value:ty),*) => {$(
        impl $name {
            /// As of std.
            pub fn fetch_add(&self, value: $value, by: Ordering) -> $value {
                self.order.access(by, Ordering::AcqRel, |by| self.value.fetch_add(value, by))
            }

            /// As of std.
            pub fn fetch_sub(&self, value: $value, by: Ordering) -> $value {
                self.order.access(by, Ordering::AcqRel, |by| self.value.fetch_sub(value, by))
            }

            /// As of std.
            pub fn fetch_min(&self, value: $value, by: Ordering) -> $value {
                self.order.access(by, Ordering::AcqRel, |by| self.value.fetch_min(value, by))
            }
        }
    )*};
}

atomics!(AtomicBool: bool, AtomicI32: i32, AtomicIsize: isize, AtomicU8: u8);
atomics!(AtomicU32: u32, AtomicU64: u64, AtomicUsize: usize);
counts!(AtomicIsize: isize, AtomicU32: u32, AtomicU64: u64, AtomicUsize: usize);

/// As of std.
#[derive(Debug)]
pub struct AtomicPtr<T> {
    value: loom::sync::atomic::AtomicPtr<T>,
    order: Order,
}

impl<T> AtomicPtr<T> {
    /// As in std, but not a const function.
    pub fn new(value: *mut T) -> Self {
        AtomicPtr { value: loom::sync::atomic::AtomicPtr::new(value), order: Order::new() }
    }

    accesses!(*mut T);
}
