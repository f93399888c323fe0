//! The power mode of a Mac, on which its speed under load depends.

use std::process::Command;

/// The power mode, as `pmset` reports it. `None` on other systems.
pub fn power_mode() -> Option<&'static str> {
    let output = Command::new("/usr/bin/pmset").arg("-g").output().ok()?;
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Macs with a high power mode print `powermode`, other Macs `lowpowermode`.
fn parse(text: &str) -> Option<&'static str> {
    let value = |key: &str| {
        let mut settings = text.lines().map(str::split_whitespace);
        settings.find_map(|mut words| if words.next()? == key { words.next() } else { None })
    };
    match value("powermode").or_else(|| value("lowpowermode"))? {
        "0" => Some("automatic"),
        "1" => Some("low power"),
        "2" => Some("high power"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_mode_parses() {
        let settings =
            |line: &str| format!("System-wide power settings:\nCurrently in use:\n standby 1\n\n {line}\n sleep 1\n");
        let found = |line: &str| parse(&settings(line));
        assert_eq!(found("lowpowermode         1"), Some("low power"));
        assert_eq!(found("powermode            0"), Some("automatic"));
        assert_eq!(found("powermode            2\n lowpowermode 0"), Some("high power"));
        assert_eq!((found("powermode"), found("powermode 7"), found("other 1")), (None, None, None));
    }
}
