//! Measures the memory bandwidth of this machine.

use super::Slab;
use std::{
    hint::black_box,
    io,
    time::{Duration, Instant},
};

/// Measures read bandwidth in bytes per second: `threads` threads read a block of `bytes` bytes for about `budget`. The
/// block must be larger than the CPU caches.
pub fn memory_bandwidth(threads: usize, bytes: usize, budget: Duration) -> io::Result<f64> {
    let threads = threads.max(1);
    let part = (bytes / threads).next_multiple_of(4096);
    let slab = Slab::new(part * threads)?;
    let rates = std::thread::scope(|scope| {
        let measure = |thread: usize| {
            // SAFETY: each thread uses a different part of the slab.
            let mine = unsafe { slab.bytes_mut(thread * part..(thread + 1) * part) };
            // The first write to a page commits its memory.
            mine.fill(thread as u8 + 1);
            let begin = Instant::now();
            let mut passes = 0;
            while passes == 0 || begin.elapsed() < budget {
                black_box(sum(black_box(mine)));
                passes += 1;
            }
            passes as f64 * part as f64 / begin.elapsed().as_secs_f64()
        };
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || measure(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).collect::<Vec<f64>>()
    });
    Ok(rates.iter().sum())
}

/// Adds up all bytes as 64-bit words. Uses 32 independent sums, so that additions do not wait for each other.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    let (lines, _) = bytes.as_chunks::<256>();
    for line in lines {
        let (words, _) = line.as_chunks::<8>();
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_reads_every_byte() {
        let mut bytes = vec![0u8; 4096];
        for i in (0..4096).step_by(8) {
            bytes[i] = 1;
        }
        assert_eq!(sum(&bytes), 512);
        bytes[4088] = 5;
        assert_eq!(sum(&bytes), 516);
    }

    #[test]
    fn memory_bandwidth_is_plausible() {
        let rate = memory_bandwidth(2, 8 << 20, Duration::from_millis(20)).unwrap();
        assert!(rate > 100e6 && rate < 10e12, "{rate}");
    }
}
