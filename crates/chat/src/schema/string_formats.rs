//! Regular expressions of the string formats of JSON Schema.
//!
//! Each expression matches only valid texts, except that of `uri`, which does not check an IPv6 address or the names of a
//! host. None matches all valid texts: no year 0, no leap second, no comments and no domains without a dot in email
//! addresses, no URIs that end after the scheme, and no IPv4 address at the end of an IPv6 address. llguidance's
//! expressions also match a 61st second in every minute, the year 0, and 29 February in every year.

const MONTH_AND_DAY: &str = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|\
                             02-(0[1-9]|1[0-9]|2[0-8]))";
const YEAR: &str = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])";
/// Years that are multiples of 4 and not of 100, and multiples of 400.
const LEAP_YEAR: &str = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)";
const TIME: &str = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const LABEL: &str = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?";
const ATOM: &str = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+";
const OCTET: &str = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
const POINTER: &str = "(/([^~/]|~[01])*)*";
const GROUP: &str = "[0-9a-fA-F]{1,4}";

/// The pattern of a format. `None` if the format is unknown: it is an annotation, as in the JSON Schema specification.
pub fn format_pattern(format: &str) -> Option<String> {
    expression(format).map(|expression| format!("^({expression})$"))
}

fn expression(format: &str) -> Option<String> {
    let date = || format!("({YEAR}-{MONTH_AND_DAY}|{LEAP_YEAR}-02-29)");
    let hostname = || format!(r"{LABEL}(\.{LABEL})*");
    Some(match format {
        "date" => date(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{}T{TIME}", date()),
        "duration" => {
            let days = units(["Y", "M", "D"]);
            let time = format!("T{}", units(["H", "M", "S"]));
            format!("P({days}({time})?|{time}|[0-9]{{1,9}}W)")
        }
        // Validators ask for a dot in the domain.
        "email" | "idn-email" => format!(r"{ATOM}(\.{ATOM})*@({LABEL}\.)+{LABEL}"),
        "hostname" => hostname(),
        "ipv4" => format!(r"({OCTET}\.){{3}}{OCTET}"),
        "ipv6" => {
            // `::` stands for at least one group.
            let short = (0..=6).map(|before| match before {
                0 => format!("::({GROUP}(:{GROUP}){{0,6}})?"),
                _ => format!("{GROUP}(:{GROUP}){{{}}}::({GROUP}(:{GROUP}){{0,{}}})?", before - 1, 6 - before),
            });
            let full = format!("{GROUP}(:{GROUP}){{7}}");
            short.chain([full]).collect::<Vec<_>>().join("|")
        }
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "json-pointer" => POINTER.to_owned(),
        "relative-json-pointer" => format!("(0|[1-9][0-9]{{0,8}})(#|{POINTER})"),
        "uri" | "iri" | "uri-reference" | "iri-reference" => {
            let text = |more: &str| format!("([a-zA-Z0-9._~!$&'()*+,;=:@{more}-]|%[0-9a-fA-F]{{2}})");
            let segment = text("");
            let tail = text("/?") + "*";
            let address = r"\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?";
            // Validators ask for text after the colon.
            let start = format!("(//({address})?{segment}*|/?{segment}+)");
            let absolute = format!("[a-zA-Z][a-zA-Z0-9+.-]*:{start}(/{segment}*)*");
            let relative = format!("(/({segment}+(/{segment}*)*)?|[a-zA-Z0-9._~-]+(/{segment}*)*)?");
            let path = if format.ends_with("reference") { format!("({absolute}|{relative})") } else { absolute };
            format!(r"{path}(\?{tail})?(#{tail})?")
        }
        _ => return None,
    })
}

/// Numbers with three units. The first unit, the last unit, or both may be missing.
fn units([first, second, third]: [&str; 3]) -> String {
    let number = "[0-9]{1,9}";
    let last = format!("{number}{third}");
    let later = format!("{number}{second}({last})?");
    format!("({number}{first}({later})?|{later}|{last})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_match_valid_texts_only() {
        let uuid = "123e4567-e89b-12d3-a456-426614174000";
        for (format, valid, invalid) in [
            (
                "date",
                &["2026-11-24", "2024-02-29", "2000-02-29", "0004-02-29", "0010-01-01"][..],
                &["2026-02-30", "2026-13-01", "26-1-1", "2023-02-29", "1900-02-29", "0000-02-29", "0000-01-01"][..],
            ),
            ("time", &["23:59:59Z", "00:00:00.5+01:30"], &["24:00:00Z", "12:00:60Z", "12:00:00"]),
            ("date-time", &["2026-11-24T12:00:00Z"], &["2026-11-24 12:00:00Z", "2026-11-24"]),
            ("duration", &["P1Y2M3D", "PT5M", "P1DT1H", "P2W"], &["P", "PT", "1D", "P1Y3D"]),
            ("email", &["a.b@example.org", "a.b.c.d+e@x.y.z"], &["a@", "a@x", "a..b@x.org", "@x.org"]),
            ("hostname", &["a", "a-b.example"], &["-a", "a-", "a..b"]),
            ("ipv4", &["0.0.0.0", "255.10.1.99"], &["256.1.1.1", "1.1.1", "01.1.1.1"]),
            ("ipv6", &["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2"], &["1:2", "1::2::3", "1:2:3:4:5:6:7:8::"]),
            ("uuid", &[uuid, &uuid.to_uppercase()], &["123e4567", "123e4567-e89b-12d3-a456-42661417400g"]),
            (
                "uri",
                &["https://me@a.example:80/b/c?d=e#f", "file:/a", "file:///a", "urn:isbn:1", "http://[::1]:80/"],
                &["a b", "//x", "http://a b", "http://[a", "a:"],
            ),
        ] {
            let regex = fancy_regex::Regex::new(&format_pattern(format).unwrap()).unwrap();
            valid.iter().for_each(|text| assert!(regex.is_match(text).unwrap(), "{format}: {text}"));
            invalid.iter().for_each(|text| assert!(!regex.is_match(text).unwrap(), "{format}: {text}"));
        }
        assert_eq!(format_pattern("phone"), None);
    }
}
