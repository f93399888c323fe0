//! `moestro config`: prints every setting of `serve` as a `moestro.toml`, with its source.

use crate::config::config_file::Settings;

/// Formats one setting per line. A setting without a value is written as a comment.
pub fn report(settings: &Settings) -> String {
    let rows: Vec<(String, &str)> =
        settings.rows.iter().map(|row| (line(&row.flag, row.value.as_deref()), row.from.as_str())).collect();
    let width = rows.iter().map(|(line, _)| line.chars().count()).filter(|&width| width <= 60).max().unwrap_or(0);
    let head = match &settings.file {
        Some(path) => format!("# {}\n", path.display()),
        None => "# no configuration file\n".into(),
    };
    rows.into_iter().fold(head, |text, (line, from)| format!("{text}{line:width$}  # {from}\n"))
}

fn line(flag: &str, value: Option<&str>) -> String {
    match value {
        None => format!("# {flag} ="),
        Some(value) if value == "true" || value == "false" || value.parse::<f64>().is_ok_and(f64::is_finite) => {
            format!("{flag} = {value}")
        }
        Some(value) => format!("{flag} = {}", toml::Value::from(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::config_file;
    use test_support::own_process::ran_without_settings;

    #[test]
    fn report_is_valid_toml() {
        if ran_without_settings(report_is_valid_toml) {
            return;
        }
        let args = ["moestro", "config", "--temp", "0.5", "--cors", "http://localhost:3000", "--memory-limit", "2GiB"];
        let text = report(&config_file::parse(args.map(Into::into)).unwrap().1);
        assert!(text.contains("command line") && text.contains("# default"), "{text}");
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["temp"].as_float(), Some(0.5));
        assert_eq!(table["port"].as_integer(), Some(5413));
        assert_eq!(table["memory-limit"].as_str(), Some("2GiB"));
        assert!(!table.contains_key("threads") && text.contains("# threads ="), "{text}");
    }
}
