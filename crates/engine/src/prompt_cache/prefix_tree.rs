//! A tree of token sequences. The parent of a sequence is its longest proper prefix in the tree.
//!
//! No sequence is a prefix of a sibling, so a prompt matches at most one child of each node.

use std::ops::{Index, IndexMut};

/// Index of a node. [`PrefixTree::remove`] makes the index free for another node.
pub type NodeId = usize;

pub struct PrefixTree<T> {
    nodes: Vec<Option<TreeNode<T>>>,
    free: Vec<NodeId>,
    /// Nodes without a parent.
    roots: Vec<NodeId>,
}

struct TreeNode<T> {
    parent: Option<NodeId>,
    children: Vec<NodeId>,
    /// Tokens of this sequence after the tokens of the parent.
    edge: Vec<u32>,
    /// Number of tokens in the whole sequence.
    len: usize,
    value: T,
}

impl<T> Default for PrefixTree<T> {
    fn default() -> Self {
        Self { nodes: Vec::new(), free: Vec::new(), roots: Vec::new() }
    }
}

impl<T> PrefixTree<T> {
    /// The nodes whose sequences are prefixes of `ids`, shortest first.
    pub fn path(&self, ids: &[u32]) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut rest = ids;
        let mut children = &self.roots;
        while let Some(&id) = children.iter().find(|&&id| rest.starts_with(&self.node(id).edge)) {
            path.push(id);
            rest = &ids[self.node(id).len..];
            children = &self.node(id).children;
        }
        path
    }

    /// The node whose sequence is exactly `ids`, which must not be empty. Adds the node if it does not exist.
    pub fn entry(&mut self, ids: &[u32], value: impl FnOnce() -> T) -> NodeId {
        let parent = self.path(ids).last().copied();
        let start = parent.map_or(0, |id| self.node(id).len);
        if let Some(id) = parent.filter(|_| start == ids.len()) {
            return id;
        }
        let edge = ids[start..].to_vec();
        // Siblings that start with the new node become its children.
        let (children, siblings): (Vec<NodeId>, Vec<NodeId>) =
            self.siblings(parent).iter().partition(|&&id| self.node(id).edge.starts_with(&edge));
        for &id in &children {
            self.node_mut(id).edge.drain(..edge.len());
        }
        let node = TreeNode { parent, children: children.clone(), edge, len: ids.len(), value: value() };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        for child in children {
            self.node_mut(child).parent = Some(id);
        }
        *self.siblings_mut(parent) = siblings.into_iter().chain([id]).collect();
        id
    }

    /// Removes a node. The children of the node become children of its parent.
    pub fn remove(&mut self, id: NodeId) -> Option<T> {
        let TreeNode { parent, children, edge, value, .. } = self.nodes.get_mut(id)?.take()?;
        self.free.push(id);
        self.siblings_mut(parent).retain(|&sibling| sibling != id);
        for child in children {
            let node = self.node_mut(child);
            node.parent = parent;
            node.edge.splice(..0, edge.iter().copied());
            self.siblings_mut(parent).push(child);
        }
        Some(value)
    }

    /// Number of tokens in a node's sequence.
    pub fn len(&self, id: NodeId) -> usize {
        self.node(id).len
    }

    pub fn parent(&self, id: NodeId) -> Option<NodeId> {
        self.node(id).parent
    }

    /// The tokens of a node's sequence.
    pub fn tokens(&self, id: NodeId) -> Vec<u32> {
        let mut parts = vec![&self.node(id).edge];
        let mut at = id;
        while let Some(parent) = self.node(at).parent {
            parts.push(&self.node(parent).edge);
            at = parent;
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &T)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| Some((id, &node.as_ref()?.value)))
    }

    fn siblings(&self, parent: Option<NodeId>) -> &[NodeId] {
        parent.map_or(&self.roots, |id| &self.node(id).children)
    }

    fn siblings_mut(&mut self, parent: Option<NodeId>) -> &mut Vec<NodeId> {
        match parent {
            Some(id) => &mut self.node_mut(id).children,
            None => &mut self.roots,
        }
    }

    fn node(&self, id: NodeId) -> &TreeNode<T> {
        self.nodes[id].as_ref().expect("the ids of removed nodes are not used")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut TreeNode<T> {
        self.nodes[id].as_mut().expect("the ids of removed nodes are not used")
    }
}

impl<T> Index<NodeId> for PrefixTree<T> {
    type Output = T;

    fn index(&self, id: NodeId) -> &T {
        &self.node(id).value
    }
}

impl<T> IndexMut<NodeId> for PrefixTree<T> {
    fn index_mut(&mut self, id: NodeId) -> &mut T {
        &mut self.node_mut(id).value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn node_is_inserted_between_others() {
        let mut tree = PrefixTree::default();
        let long = tree.entry(&[1, 2, 3, 4], || "long");
        let other = tree.entry(&[1, 2, 5], || "other");
        let short = tree.entry(&[1, 2], || "short");
        assert_eq!(tree.path(&[1, 2, 3, 4, 9]), [short, long]);
        assert_eq!(tree.path(&[1, 2, 3]), [short]);
        assert!(tree.path(&[1]).is_empty());
        assert_eq!((tree.parent(long), tree.parent(other), tree.parent(short)), (Some(short), Some(short), None));
        assert_eq!(tree.entry(&[1, 2], || "again"), short);
        assert_eq!(tree[short], "short");
        assert_eq!(tree.remove(short), Some("short"));
        assert_eq!((tree.tokens(long), tree.parent(long)), (vec![1, 2, 3, 4], None));
        assert_eq!(tree.remove(short), None);
    }

    proptest! {
        /// Compares values, prefixes and parents with those of a `BTreeMap` with the same sequences.
        #[test]
        fn tree_matches_a_map_of_sequences(steps in prop::collection::vec((prop::collection::vec(0u32..3, 1..7), any::<bool>()), 1..60)) {
            let mut tree = PrefixTree::default();
            let mut map = BTreeMap::new();
            for (number, (ids, put)) in steps.into_iter().enumerate() {
                if put {
                    let id = tree.entry(&ids, || number);
                    map.entry(ids).or_insert((id, number));
                } else if let Some((id, number)) = map.remove(&ids) {
                    prop_assert_eq!(tree.remove(id), Some(number));
                }
                prop_assert_eq!(tree.iter().count(), map.len());
                for (ids, (id, number)) in &map {
                    prop_assert_eq!(&tree.tokens(*id), ids);
                    prop_assert_eq!((tree[*id], tree.len(*id)), (*number, ids.len()));
                    let expected: Vec<NodeId> = (1..=ids.len()).filter_map(|end| Some(map.get(&ids[..end])?.0)).collect();
                    prop_assert_eq!(tree.path(ids), expected.clone());
                    prop_assert_eq!(tree.parent(*id), expected.iter().rev().nth(1).copied());
                }
            }
        }
    }
}
