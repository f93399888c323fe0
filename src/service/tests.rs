use super::*;

fn service(on_demand: Option<(&str, u16)>) -> Service {
    Service {
        program: "/opt/moe stro/bin/moestro".into(),
        args: vec!["/models/Qwen 3.5 & co".into(), "--memory-limit".into(), "48GiB".into()],
        environment: [("HF_HOME".into(), r#"/data/50% "of" $HOME"#.into())].into(),
        caches: vec![r#"/data/50% "of" $HOME"#.into()],
        home: "/home/u".into(),
        user: 501,
        on_demand: on_demand.map(|(host, port)| (host.into(), port)),
        is_confined: true,
    }
}

fn written(steps: &[ServiceStep], name: &str) -> String {
    let found = steps.iter().find_map(|step| match step {
        ServiceStep::Write(path, text) if path.ends_with(name) => Some(text.clone()),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("{name} in {steps:?}"))
}

#[test]
fn launchd_property_list_round_trips() {
    let steps = service(None).steps(ServiceManager::Launchd, ServiceCommand::Install);
    let text = written(&steps, "Library/LaunchAgents/dev.moestro.serve.plist");
    let list = plist::Value::from_reader_xml(text.as_bytes()).unwrap().into_dictionary().unwrap();
    let program: Vec<_> = list["ProgramArguments"].as_array().unwrap().iter().map(|v| v.as_string().unwrap()).collect();
    assert_eq!(program[..2], ["/opt/moe stro/bin/moestro", "serve"]);
    assert!(program.ends_with(&["/models/Qwen 3.5 & co", "--memory-limit", "48GiB"]));
    assert_eq!(list["ProcessType"].as_string(), Some("Interactive"));
    assert_eq!(list["KeepAlive"].as_dictionary().unwrap()["SuccessfulExit"].as_boolean(), Some(false));
    assert!(list.get("Sockets").is_none());
    let variables = list["EnvironmentVariables"].as_dictionary().unwrap();
    assert_eq!(variables["AGX_RELAX_CDM_CTXSTORE_TIMEOUT"].as_string(), Some("1"));
    assert_eq!(variables["HF_HOME"].as_string(), Some(r#"/data/50% "of" $HOME"#));
}

/// The launchd steps of an action, if `launchctl print` finds only the domains and agents in `known`.
fn launchd_steps(action: ServiceCommand, known: &[&str]) -> Vec<ServiceStep> {
    launchd::steps(&service(None), action, &|words| known.contains(&words[2].to_str().unwrap()))
}

#[test]
fn install_waits_for_the_old_agent() {
    let print = words(["launchctl", "print", "gui/501/dev.moestro.serve"]);
    for action in [ServiceCommand::Install, ServiceCommand::Uninstall] {
        let steps = launchd_steps(action, &["gui/501"]);
        assert_eq!(steps[0], ServiceStep::Try(words(["launchctl", "bootout", "gui/501/dev.moestro.serve"])));
        assert_eq!(steps[1], ServiceStep::WaitUntilGone(print.clone()));
    }
    // `bootstrap` exits with 5 until the old process has ended.
    let steps = launchd_steps(ServiceCommand::Install, &["gui/501"]);
    let Some(ServiceStep::Retry(last, 5)) = steps.last() else { panic!("{steps:?}") };
    assert_eq!(last[1..3], words(["bootstrap", "gui/501"]));
}

#[test]
fn agent_runs_without_a_screen_session() {
    let steps = launchd_steps(ServiceCommand::Install, &[]);
    assert!(matches!(steps.last(), Some(ServiceStep::Retry(words, 5)) if words[2] == "user/501"), "{steps:?}");
    let has_type = |steps: &[ServiceStep]| written(steps, "dev.moestro.serve.plist").contains("LimitLoadToSessionType");
    assert!(has_type(&steps) && !has_type(&launchd_steps(ServiceCommand::Install, &["gui/501"])));
    for (known, target) in [
        ("gui/501/dev.moestro.serve", "gui/501/dev.moestro.serve"),
        ("user/501/dev.moestro.serve", "user/501/dev.moestro.serve"),
        ("", "gui/501/dev.moestro.serve"),
    ] {
        let start = launchd_steps(ServiceCommand::Start, &[known]);
        assert_eq!(start, [ServiceStep::Run(words(["launchctl", "kickstart", target]))]);
    }
}

#[test]
fn steps_wait_and_retry() {
    let dir = tempfile::tempdir().unwrap();
    let shell = |script: &str| {
        let mut words = words(["/bin/sh", "-c", script]);
        words.push(dir.path().into());
        words
    };
    // Each command counts its own runs. The exit code of the command depends on the count.
    let gone = shell("echo >> $0/looks; test $(wc -l < $0/looks) -lt 3");
    perform(&ServiceStep::WaitUntilGone(gone)).unwrap();
    let busy = shell("echo >> $0/tries; test $(wc -l < $0/tries) -ge 2 || exit 5");
    perform(&ServiceStep::Retry(busy, 5)).unwrap();
    assert!(perform(&ServiceStep::Retry(shell("exit 6"), 5)).unwrap_err().contains("exit 6"));
    let count = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap().lines().count();
    assert_eq!((count("looks"), count("tries")), (3, 2));
}

#[test]
fn on_demand_launchd_opens_the_port() {
    let steps = service(Some(("127.0.0.1", 5413))).steps(ServiceManager::Launchd, ServiceCommand::Install);
    let text = written(&steps, "dev.moestro.serve.plist");
    let list = plist::Value::from_reader_xml(text.as_bytes()).unwrap().into_dictionary().unwrap();
    let socket = list["Sockets"].as_dictionary().unwrap()["Listener"].as_dictionary().unwrap();
    assert_eq!(socket["SockServiceName"].as_string(), Some("5413"));
    assert!(list.get("RunAtLoad").is_none() && list.get("KeepAlive").is_none());
}

#[test]
fn systemd_accepts_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let analyze = |command: &str, files: &[PathBuf]| {
        Command::new("systemd-analyze")
            .args(["--user", command])
            .args(files)
            .env("SYSTEMD_LOG_LEVEL", "warning")
            // systemd-analyze needs this variable to check user units.
            .env("XDG_RUNTIME_DIR", dir.path())
            .output()
    };
    // `systemd-analyze verify` requires that the program exists.
    let service =
        Service { program: std::env::current_exe().unwrap(), home: dir.path().into(), ..service(Some(("::1", 5413))) };
    for step in service.steps(ServiceManager::Systemd, ServiceCommand::Install) {
        if let ServiceStep::Write(path, text) = step {
            replace_file(&path, text.as_bytes()).unwrap();
        }
    }
    assert!(systemd::socket("fe80::1%eth0", 1).contains("ListenStream=[fe80::1%%eth0]:1"));
    let units = dir.path().join(".config/systemd/user");
    let files = [units.join("moestro.service"), units.join("moestro.socket")];
    assert!(fs::read_to_string(&files[0]).unwrap().contains(r#""/models/Qwen 3.5 & co" "--memory-limit""#));
    assert!(fs::read_to_string(&files[1]).unwrap().contains("ListenStream=[::1]:5413"));
    let Ok(verdict) = analyze("verify", &files) else {
        eprintln!("systemd is not installed: not verified");
        return;
    };
    assert!(verdict.status.success(), "{}", String::from_utf8_lossy(&verdict.stderr));
}

/// Without user namespaces, a user's systemd fails to start a unit with any of these options (status 217 or 218).
#[test]
fn unconfined_unit_needs_no_user_namespace() {
    for is_confined in [true, false] {
        let unit = systemd::unit(&Service { is_confined, ..service(None) });
        for option in ["PrivateUsers", "CapabilityBoundingSet", "ProtectKernelModules", "ProtectKernelLogs"] {
            assert_eq!(unit.contains(option), is_confined, "{option}");
        }
        for option in ["NoNewPrivileges=yes\n", "SystemCallFilter=@system-service\n"] {
            assert!(unit.contains(option), "{unit}");
        }
    }
}

#[test]
fn special_characters_are_escaped_for_systemd() {
    let mut odd = service(None);
    odd.args = vec![r#"a"b\c%d$e"#.into()];
    let unit = written(&odd.steps(ServiceManager::Systemd, ServiceCommand::Install), "moestro.service");
    assert!(unit.contains(r#""a\"b\\c%%d$$e""#), "{unit}");
    // systemd replaces variables only in commands.
    assert!(unit.contains("Environment=\"HF_HOME=/data/50%% \\\"of\\\" $HOME\"\n"), "{unit}");
    assert!(unit.contains("ReadWritePaths=\"-/data/50%% \\\"of\\\" $HOME\"\n"), "{unit}");
}

#[test]
fn uninstall_removes_what_install_wrote() {
    let managers = [ServiceManager::Launchd, ServiceManager::Systemd];
    for (manager, on_demand) in managers.into_iter().flat_map(|of| [(of, None), (of, Some(("127.0.0.1", 1)))]) {
        let service = service(on_demand);
        let removed = service.steps(manager, ServiceCommand::Uninstall);
        for step in service.steps(manager, ServiceCommand::Install) {
            let ServiceStep::Write(path, _) = step else { continue };
            // Removing a service does not remove its log files.
            assert!(path.ends_with("stderr.log") || removed.contains(&ServiceStep::Remove(path.clone())), "{path:?}");
        }
    }
}

#[test]
fn control_characters_add_no_directives() {
    let mut hostile = service(Some(("::1\nExecStartPre=/bin/false", 5413)));
    hostile.args = vec!["--models-dir=/x\nExecStartPre=/bin/false\r".into()];
    let steps = hostile.steps(ServiceManager::Systemd, ServiceCommand::Install);
    let unit = written(&steps, "moestro.service");
    assert!(unit.contains(r#""--models-dir=/x\x0aExecStartPre=/bin/false\x0d""#), "{unit}");
    for text in [unit, written(&steps, "moestro.socket")] {
        assert!(!text.lines().any(|line| line.starts_with("ExecStartPre")), "{text}");
    }
}
