use super::*;
use clap::CommandFactory;

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_flag_has_its_variable() {
    for command in Cli::command().get_subcommands() {
        for arg in command.get_arguments() {
            let Some(long) = arg.get_long().filter(|&long| long != "help") else { continue };
            if (command.get_name(), long) == ("bench", "draft-model") {
                // There it asks for another bench.
                assert!(arg.get_env().is_none());
                continue;
            }
            let variable = format!("MOESTRO_{}", long.to_uppercase().replace('-', "_"));
            assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(&*variable), "--{long}");
        }
    }
}

#[test]
fn odd_values_are_refused_in_words() {
    let refused = |flags: &[&str]| {
        let typed = ["moestro", "serve"].iter().chain(flags);
        Cli::try_parse_from(typed).map(|_| ()).unwrap_err().to_string()
    };
    assert!(refused(&["--top-p", "1.5"]).contains("not between 0 and 1"));
    assert!(refused(&["--temp", "nan"]).contains("not a number from 0 up"));
    assert!(refused(&["--threads", "0"]).contains("from 1 to 1024"));
    assert!(refused(&["--threads", "10000"]).contains("from 1 to 1024"));
    assert!(refused(&["--io-threads", "100000"]).contains("from 1 to 1024"));
    assert!(refused(&["--ctx-size", "4611686018427387904"]).contains("from 1 to 16777216"));
    assert!(refused(&["--prefill-chunk", "1000000"]).contains("from 1 to 65536"));
    assert!(refused(&["--max-queue", "99999999"]).contains("from 0 to 65536"));
    assert!(refused(&["--allowed-host", "http://x"]).contains("without scheme or port"));
    assert!(refused(&["--api-key", "a", "--api-key-file", "b"]).contains("cannot be used with"));
    assert!(refused(&["--memory-limit", "8Q"]).contains("8GiB"));
    assert!(refused(&["--api-key", ""]).contains("empty"));
    assert!(refused(&["--port", "70000"]).contains("65535"));
    assert!(refused(&["--cors", "example.com"]).contains("https://"));
    assert!(refused(&["--device", "tpu"]).contains("cuda"));
}
