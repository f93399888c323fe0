//! A macro that compiles portable code once for each instruction set.

/// Defines a function that is compiled for every [`super::Isa`] and runs the best version for the processor.
///
/// All versions execute the same operations and give the same bytes. Wider instruction sets execute more operations at
/// once, and `mul_add` is one instruction instead of a call. In the body, `V` is the instruction set's
/// [`super::Vector`]. Functions called in the body should be `#[inline(always)]`. A closure is compiled for the
/// baseline processor unless it is inlined. Type parameters are in brackets: `fn name[T: Bound](...)`.
macro_rules! wide {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $([$($g:tt)*])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($g)*>)? ($($arg: $ty),*) $(-> $ret)? {
            #[allow(unused_imports)]
            use $crate::ops::simd::{self as wide_simd, Vector};
            use std::marker::PhantomData;

            #[inline(always)]
            fn plain<V: Vector, $($($g)*)?>(_: PhantomData<V>, $($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi2")]
            fn avx2 $(<$($g)*>)? ($($arg: $ty),*) $(-> $ret)? {
                plain(PhantomData::<wide_simd::vector::Avx2>, $($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512 $(<$($g)*>)? ($($arg: $ty),*) $(-> $ret)? {
                plain(PhantomData::<wide_simd::vector::Avx512>, $($arg),*)
            }

            match wide_simd::Isa::best() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` other than Scalar is one that the processor reported.
                wide_simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                wide_simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                _ => plain(PhantomData::<[f32; 16]>, $($arg),*),
            }
        }
    };
}

pub(crate) use wide;
