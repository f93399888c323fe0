use super::*;

/// Allows exactly the sequence `tokens`.
#[derive(Clone)]
struct Script {
    tokens: Vec<u32>,
    at: usize,
}

impl Constraint for Script {
    fn allowed(&mut self) -> Result<TokenMask, String> {
        let id = self.tokens.get(self.at).ok_or("the script is over")?;
        Ok(TokenMask::Only(vec![1 << id]))
    }

    fn accept(&mut self, _: u32) -> Result<(), String> {
        self.at += 1;
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn fork_advances_independently() {
    let worker = MaskWorker::start(Box::new(Script { tokens: vec![5, 6, 7, 8], at: 0 })).unwrap();
    assert!(worker.next_mask().unwrap().contains(5));
    worker.append(5);
    let mut copy = worker.fork().unwrap();
    assert!(copy.allowed().unwrap().contains(6));
    copy.accept(6).unwrap();
    assert!(copy.allowed().unwrap().contains(7));
    assert!(worker.next_mask().unwrap().contains(6) && !TokenMask::Only(vec![0]).contains(6));
    worker.append(6);
    assert!(worker.next_mask().unwrap().contains(7));
}

/// Computes no mask until the other end of the channel is dropped.
struct Blocked(std::sync::Arc<std::sync::Mutex<Receiver<()>>>);

impl Constraint for Blocked {
    fn allowed(&mut self) -> Result<TokenMask, String> {
        let _ = self.0.lock().unwrap().recv();
        Ok(TokenMask::Any)
    }

    fn accept(&mut self, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(self.0.clone()))
    }
}

#[test]
fn slow_mask_ends_its_answer_only() {
    let (release, blocked) = channel();
    let worker = MaskWorker::start(Box::new(Blocked(std::sync::Arc::new(std::sync::Mutex::new(blocked))))).unwrap();
    let error = worker.next_mask_within(Duration::from_millis(1)).unwrap_err();
    assert!(error.to_string().contains("took longer than 1ms for one token"), "{error}");
    drop(release);
    assert!(worker.next_mask().unwrap().contains(7), "the thread still works after a slow mask");
}
