use super::*;

fn service(on_demand: Option<(&str, u16)>) -> Service {
    Service {
        program: "/opt/moe stro/bin/moestro".into(),
        args: vec!["/models/Qwen 3.5 & co".into(), "--memory-limit".into(), "48GiB".into()],
        home: "/home/u".into(),
        user: 501,
        on_demand: on_demand.map(|(host, port)| (host.into(), port)),
        confined: true,
    }
}

fn written(steps: &[Step], name: &str) -> String {
    let found = steps.iter().find_map(|step| match step {
        Step::Write(path, text) if path.ends_with(name) => Some(text.clone()),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("{name} in {steps:?}"))
}

#[test]
fn the_agents_property_list_reads_back() {
    let steps = service(None).steps(Manager::Launchd, Action::Install);
    let text = written(&steps, "Library/LaunchAgents/dev.moestro.serve.plist");
    let list = plist::Value::from_reader_xml(text.as_bytes()).unwrap().into_dictionary().unwrap();
    let program: Vec<_> = list["ProgramArguments"].as_array().unwrap().iter().map(|v| v.as_string().unwrap()).collect();
    assert_eq!(program[..2], ["/opt/moe stro/bin/moestro", "serve"]);
    assert!(program.ends_with(&["/models/Qwen 3.5 & co", "--memory-limit", "48GiB"]));
    assert_eq!(list["ProcessType"].as_string(), Some("Interactive"));
    assert_eq!(list["KeepAlive"].as_dictionary().unwrap()["SuccessfulExit"].as_boolean(), Some(false));
    assert!(list.get("Sockets").is_none());
    assert!(matches!(steps.last(), Some(Step::Run(words)) if words[1] == "bootstrap" && words[2] == "gui/501"));
}

#[test]
fn on_demand_launchd_holds_the_port() {
    let text = written(
        &service(Some(("127.0.0.1", 5413))).steps(Manager::Launchd, Action::Install),
        "dev.moestro.serve.plist",
    );
    let list = plist::Value::from_reader_xml(text.as_bytes()).unwrap().into_dictionary().unwrap();
    let socket = list["Sockets"].as_dictionary().unwrap()["Listener"].as_dictionary().unwrap();
    assert_eq!(socket["SockServiceName"].as_string(), Some("5413"));
    assert!(list.get("RunAtLoad").is_none() && list.get("KeepAlive").is_none());
}

#[test]
fn systemd_finds_no_fault_with_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let analyze = |command: &str, files: &[PathBuf]| {
        Command::new("systemd-analyze")
            .args(["--user", command])
            .args(files)
            .env("SYSTEMD_LOG_LEVEL", "warning")
            // Without one, it looks at nothing.
            .env("XDG_RUNTIME_DIR", dir.path())
            .output()
    };
    // The program has to be there for `verify` to pass.
    let service =
        Service { program: std::env::current_exe().unwrap(), home: dir.path().into(), ..service(Some(("::1", 5413))) };
    for step in service.steps(Manager::Systemd, Action::Install) {
        if let Step::Write(path, text) = step {
            replace_file(&path, text.as_bytes()).unwrap();
        }
    }
    let units = dir.path().join(".config/systemd/user");
    let files = [units.join("moestro.service"), units.join("moestro.socket")];
    assert!(fs::read_to_string(&files[0]).unwrap().contains(r#""/models/Qwen 3.5 & co" "--memory-limit""#));
    assert!(fs::read_to_string(&files[1]).unwrap().contains("ListenStream=[::1]:5413"));
    let Ok(verdict) = analyze("verify", &files) else {
        eprintln!("systemd is not here: not verified");
        return;
    };
    assert!(verdict.status.success(), "{}", String::from_utf8_lossy(&verdict.stderr));
}

/// With one of these a user's systemd without user namespaces ends the unit before it begins, with 217 or 218.
#[test]
fn a_unit_asks_for_no_more_than_users_are_given() {
    for confined in [true, false] {
        let unit = systemd::unit(&Service { confined, ..service(None) });
        for option in ["PrivateUsers", "CapabilityBoundingSet", "ProtectKernelModules", "ProtectKernelLogs"] {
            assert_eq!(unit.contains(option), confined, "{option}");
        }
        assert!(
            unit.contains("NoNewPrivileges=yes\n") && unit.contains("SystemCallFilter=@system-service\n"),
            "{unit}"
        );
    }
}

#[test]
fn words_survive_systemd() {
    let mut odd = service(None);
    odd.args = vec![r#"a"b\c%d$e"#.into()];
    let unit = written(&odd.steps(Manager::Systemd, Action::Install), "moestro.service");
    assert!(unit.contains(r#""a\"b\\c%%d$$e""#), "{unit}");
}

#[test]
fn uninstalling_leaves_nothing_that_installing_wrote() {
    for (manager, on_demand) in [
        (Manager::Launchd, None),
        (Manager::Launchd, Some(("127.0.0.1", 1))),
        (Manager::Systemd, None),
        (Manager::Systemd, Some(("127.0.0.1", 1))),
    ] {
        let service = service(on_demand);
        let removed = service.steps(manager, Action::Uninstall);
        for step in service.steps(manager, Action::Install) {
            let Step::Write(path, _) = step else { continue };
            // Logs outlive the service.
            assert!(path.ends_with("stderr.log") || removed.contains(&Step::Remove(path.clone())), "{path:?}");
        }
    }
}
