//! Tests of the ports that tests use.

use crate::program::{free_port, free_port_from};
use std::{
    collections::BTreeSet,
    env,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
};

const FIRST: &str = "MOESTRO_TEST_FIRST_PORT";
const NAME: &str = "ports::processes_get_different_ports";

#[test]
fn processes_get_different_ports() {
    if let Ok(first) = env::var(FIRST) {
        println!("\nport {}", free_port_from(first.parse().unwrap()));
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let first = free_port();
    let python = format!(
        "import random, sys; random.sample = lambda *_: range({first}, 30_000); from free_port import free_port; \
         print('port', free_port(), flush=True); sys.stdin.read()"
    );
    let commands = (0..8).map(|number| {
        let mut command = Command::new(if number % 2 == 0 { env::current_exe().unwrap() } else { "python3".into() });
        if number % 2 == 0 {
            command.args([NAME, "--exact", "--nocapture"]).env(FIRST, first.to_string());
        } else {
            let support = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support");
            command.args(["-Bc", &python]).env("PYTHONPATH", support);
        }
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        if number % 2 == 0 { Some(child.unwrap()) } else { child.ok() }
    });
    let mut children: Vec<_> = commands.flatten().collect();
    if children.len() < 8 {
        println!("skipped for Python, because there is no python3");
    }
    let mut ports = BTreeSet::from([first]);
    let lines = |child: &mut Child| BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut outputs: Vec<_> = children.iter_mut().map(lines).collect();
    for lines in &mut outputs {
        let port = lines.find_map(|line| line.strip_prefix("port ")?.parse().ok());
        assert!(ports.insert(port.unwrap()), "{port:?} again: {ports:?}");
    }
    for (mut child, lines) in children.into_iter().zip(outputs) {
        drop(child.stdin.take());
        lines.for_each(drop);
        child.wait().unwrap();
    }
}
