//! Elementary functions in f32 that compilers vectorise. All processors give the same bytes.

/// 1.5 * 2^23. Adding this constant to an f32 below 2^22 rounds it to an integer, half to even. The integer is then in
/// the low bits of the sum; see [`rounded`].
pub const ROUND: f32 = 12_582_912.0;

/// The integer in a sum of [`ROUND`] and a number.
#[inline(always)]
pub fn rounded(sum: f32) -> i32 {
    sum.to_bits().wrapping_sub(ROUND.to_bits()) as i32
}

/// `e^x` with an error of about one unit in the last place; 0 below -104, infinity above 89.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // A clamp that keeps NaN.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let (p, n) = parts(x);
    // 2^n as two factors, because the result may be subnormal.
    let half = n >> 1;
    p * power(half) * power(n.wrapping_sub(half))
}

/// The same bytes as [`exp`] between -87 and 88 and for NaN. Undefined elsewhere.
#[inline(always)]
pub fn exp_normal(x: f32) -> f32 {
    let (p, n) = parts(x);
    p * power(n)
}

/// `p` and `n` such that `e^x = p * 2^n`.
#[inline(always)]
fn parts(x: f32) -> (f32, i32) {
    let sum = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = sum - ROUND;
    // ln 2 in two parts. Products of n with the first part are exact.
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    // Taylor polynomial of degree 7 for |r| <= ln 2 / 2.
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, c);
    }
    (p, rounded(sum))
}

/// `2^n`, if this is a normal number.
#[inline(always)]
fn power(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units() {
        let mut x = -110.0f32;
        while x < 95.0 {
            let got = f64::from(exp(x));
            let exact = f64::from(x).exp();
            assert!(!(-87.0..88.0).contains(&x) || exp_normal(x) == exp(x), "{x}");
            if exact < f64::from(f32::MAX) && exact > 1.2e-38 {
                assert!((got / exact - 1.0).abs() < 2.4e-7, "exp({x}) = {got}, not {exact}");
            } else if exact <= 1.2e-38 {
                assert!((got - exact).abs() < 3e-45, "exp({x}) = {got}, not {exact}");
            } else {
                assert_eq!(got, f64::INFINITY);
            }
            x += 0.003_7;
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan() && exp_normal(f32::NAN).is_nan());
        assert_eq!((exp(f32::INFINITY), exp(f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
        assert_eq!((sigmoid(-200.0), silu(-200.0), silu(200.0)), (0.0, 0.0, 200.0));
    }
}
