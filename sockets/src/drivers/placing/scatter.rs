//! A frame scattered over several buffers.

/// Headers, two ranges, overflow.
pub const PARTS: usize = 4;

/// The bytes of a frame, part by part.
#[derive(Clone, Copy)]
pub struct Landed<'a, const N: usize = PARTS>([&'a [u8]; N]);

impl<'a, const N: usize> Landed<'a, N> {
    /// A frame of `bytes` bytes in the front of these parts.
    pub fn new(parts: [&'a [u8]; N], bytes: usize) -> Landed<'a, N> {
        let mut left = bytes;
        Landed(parts.map(|p| {
            let n = p.len().min(left);
            left = left.saturating_sub(n);
            p.get(..n).unwrap_or(&[])
        }))
    }

    /// Copies the bytes of the frame from offset `from` on that fit, and returns their number.
    pub fn copy(&self, from: usize, to: &mut [u8]) -> usize {
        let (mut skip, mut done) = (from, 0usize);
        for part in self.0 {
            let rest = part.get(skip.min(part.len())..).unwrap_or(&[]);
            skip = skip.saturating_sub(part.len());
            let Some(space) = to.get_mut(done..) else { break };
            let n = rest.len().min(space.len());
            if let (Some(to), Some(from)) = (space.get_mut(..n), rest.get(..n)) {
                to.copy_from_slice(from);
            }
            done = done.saturating_add(n);
        }
        done
    }
}

/// Wipes the first `bytes` bytes of the parts.
pub fn wipe<'a>(parts: impl IntoIterator<Item = &'a mut [u8]>, bytes: usize) {
    let mut left = bytes;
    for part in parts {
        let n = part.len().min(left);
        if let Some(touched) = part.get_mut(..n) {
            touched.fill(0);
        }
        left = left.saturating_sub(n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_frame_in_parts_is_the_frame(
            lens in proptest::array::uniform4(0usize..40),
            bytes in 0usize..200,
            from in 0usize..200,
            space in 0usize..200,
        ) {
            let whole: Vec<u8> = (0..lens.iter().sum::<usize>()).map(|i| i as u8 + 1).collect();
            let mut rest = whole.as_slice();
            let parts = lens.map(|n| {
                let (part, r) = rest.split_at(n);
                rest = r;
                part
            });
            let frame = &whole[..bytes.min(whole.len())];
            let mut to = vec![0; space];
            let n = Landed::new(parts, bytes).copy(from, &mut to);
            let expected = frame.get(from..).unwrap_or(&[]);
            prop_assert_eq!(n, expected.len().min(space));
            prop_assert_eq!(&to[..n], &expected[..n]);
        }

        #[test]
        fn wiping_touches_the_front_and_nothing_else(
            lens in proptest::array::uniform3(0usize..40), bytes in 0usize..130,
        ) {
            let mut parts: Vec<Vec<u8>> = lens.iter().map(|n| vec![7; *n]).collect();
            wipe(parts.iter_mut().map(Vec::as_mut_slice), bytes);
            for (i, b) in parts.concat().iter().enumerate() {
                prop_assert_eq!(*b == 0, i < bytes);
            }
        }
    }
}
