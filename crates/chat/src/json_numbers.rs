//! JSON numbers of any size.

/// True if the JSON number `text` has an integer value. `None` if `text` is not a JSON number.
pub fn is_integer(text: &str) -> Option<bool> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    let (down, places) = match exponent.strip_prefix('-') {
        Some(places) => (true, places),
        None => (false, exponent.strip_prefix('+').unwrap_or(exponent)),
    };
    let leading_zero = whole.len() > 1 && whole.starts_with('0');
    if leading_zero || ![whole, fraction, places].into_iter().all(digits) {
        return None;
    }
    let places = places.parse().unwrap_or(usize::MAX);
    let fraction = fraction.trim_end_matches('0');
    let zeros = whole.len() - whole.trim_end_matches('0').len();
    let zero = fraction.is_empty() && zeros == whole.len();
    Some(match down {
        _ if zero => true,
        true => fraction.is_empty() && zeros >= places,
        false => fraction.len() <= places,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn integers_are_recognized_by_value() {
        for text in ["0", "-0", "5", "5.0", "1.5e1", "100e-2", "0.0e-99", "1e999", "12.50e1", "-7E+0"] {
            assert_eq!(is_integer(text), Some(true), "{text}");
        }
        for text in ["0.5", "1.5", "15e-1", "1e-999999999999999999999", "1.25e1"] {
            assert_eq!(is_integer(text), Some(false), "{text}");
        }
        for text in ["", "-", "01", "1.", ".5", "1e", "1e+", "+1", "1 ", "1.e1", "0x1", "1e1.0", "--1", "NaN", "١"] {
            assert_eq!(is_integer(text), None, "{text}");
        }
        assert_eq!(is_integer(&"9".repeat(5000)), Some(true));
    }

    proptest! {
        #[test]
        fn is_integer_agrees_with_serde_json(text in "-?[0-9]{0,4}(\\.[0-9]{0,3})?([eE][+-]?[0-9]{0,2})?") {
            let read = serde_json::from_str::<f64>(&text).ok();
            prop_assert_eq!(is_integer(&text).is_some(), read.is_some());
        }
    }
}
