//! The instruction sets that have kernels.

use std::sync::OnceLock;

/// An instruction set that has kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Portable Rust: the reference, and the fallback on other processors.
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with `sdot`.
    #[cfg(target_arch = "aarch64")]
    Dotprod,
}

impl Isa {
    /// The best instruction set of this processor.
    pub fn best() -> Self {
        #[cfg(test)]
        if let Some(forced) = super::tests::FORCED.get() {
            return forced;
        }
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| *Self::all().last().unwrap_or(&Isa::Scalar))
    }

    /// All instruction sets of this processor, slowest first.
    pub fn all() -> Vec<Self> {
        #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_mut))]
        let mut all = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! has { ($($name:tt)*) => { $(std::arch::is_x86_feature_detected!($name))&&* } }
            if has!("avx2" "fma" "bmi2") {
                all.push(Isa::Avx2);
                if has!("avx512f" "avx512bw" "avx512vl" "avx512dq" "avx512vnni") {
                    all.push(Isa::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            all.push(Isa::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Isa::Dotprod);
            }
        }
        all
    }
}
