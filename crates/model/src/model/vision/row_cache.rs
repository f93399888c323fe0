//! A cache of the rows of recent images, so that the tower computes an image once for several requests.

use std::sync::Arc;

/// Rows by image hash, least recently used first. The newest entry always stays, even if it exceeds the limit.
#[derive(Debug, Default)]
pub struct ImageRowCache {
    entries: Vec<([u8; 32], Arc<Vec<f32>>)>,
    /// Maximum number of bytes.
    limit: usize,
}

impl ImageRowCache {
    pub fn new(limit: usize) -> Self {
        Self { entries: Vec::new(), limit }
    }

    /// Returns the rows `[tokens, hidden]` of an image, if they are cached.
    pub fn get(&mut self, hash: &[u8; 32]) -> Option<Arc<Vec<f32>>> {
        let index = self.entries.iter().position(|(of, _)| of == hash)?;
        let entry = self.entries.remove(index);
        let rows = entry.1.clone();
        self.entries.push(entry);
        Some(rows)
    }

    pub fn insert(&mut self, hash: [u8; 32], rows: Arc<Vec<f32>>) {
        self.entries.retain(|(of, _)| *of != hash);
        self.entries.push((hash, rows));
        while self.entries.len() > 1 && self.bytes() > self.limit {
            self.entries.remove(0);
        }
    }

    pub fn bytes(&self) -> usize {
        self.entries.iter().map(|(_, rows)| size_of_val(&rows[..])).sum()
    }

    /// Removes all entries except the rows of this image.
    pub fn retain_only(&mut self, hash: Option<[u8; 32]>) {
        self.entries.retain(|(of, _)| Some(*of) == hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_rows_leave_first() {
        let mut cache = ImageRowCache::new(24);
        let rows = |n: usize| Arc::new(vec![0.0; n]);
        for hash in 0..3 {
            cache.insert([hash; 32], rows(2));
        }
        assert!(cache.get(&[0; 32]).is_some());
        cache.insert([3; 32], rows(2));
        assert_eq!([0, 1, 2, 3].map(|hash| cache.get(&[hash; 32]).is_some()), [true, false, true, true]);
        cache.insert([4; 32], rows(100));
        assert_eq!(cache.bytes(), 400, "the newest entry stays alone");
        cache.retain_only(Some([4; 32]));
        assert_eq!(cache.bytes(), 400);
        cache.retain_only(None);
        assert_eq!(cache.bytes(), 0);
    }
}
