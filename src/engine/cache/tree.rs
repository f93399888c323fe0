//! A tree of token sequences: a node is one that is worth remembering, its parent the longest remembered one that it
//! begins with. Of two siblings neither begins with the other, so the way down along a prompt never forks.

use std::ops::{Index, IndexMut};

/// A node's place. It is given out again after [`Tree::remove`].
pub type Id = usize;

pub struct Tree<T> {
    nodes: Vec<Option<Node<T>>>,
    free: Vec<Id>,
    /// Nodes without a parent.
    roots: Vec<Id>,
}

struct Node<T> {
    parent: Option<Id>,
    children: Vec<Id>,
    /// The tokens behind the parent's.
    edge: Vec<u32>,
    /// All tokens, the parent's included.
    len: usize,
    value: T,
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Self { nodes: Vec::new(), free: Vec::new(), roots: Vec::new() }
    }
}

impl<T> Tree<T> {
    /// The nodes that `ids` begin with, the shortest first.
    pub fn path(&self, ids: &[u32]) -> Vec<Id> {
        let (mut path, mut rest, mut children) = (Vec::new(), ids, &self.roots);
        while let Some(&id) = children.iter().find(|&&id| rest.starts_with(&self.node(id).edge)) {
            path.push(id);
            rest = &ids[self.node(id).len..];
            children = &self.node(id).children;
        }
        path
    }

    /// The node of exactly `ids`, made if there is none; `ids` are not empty.
    pub fn entry(&mut self, ids: &[u32], value: impl FnOnce() -> T) -> Id {
        let parent = self.path(ids).last().copied();
        let start = parent.map_or(0, |id| self.node(id).len);
        if let Some(id) = parent.filter(|_| start == ids.len()) {
            return id;
        }
        let edge = ids[start..].to_vec();
        // Children of the parent that begin with the new node come below it.
        let (below, beside): (Vec<Id>, Vec<Id>) =
            self.siblings(parent).iter().partition(|&&id| self.node(id).edge.starts_with(&edge));
        for &id in &below {
            self.node_mut(id).edge.drain(..edge.len());
        }
        let node = Node { parent, children: below.clone(), edge, len: ids.len(), value: value() };
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
        for child in below {
            self.node_mut(child).parent = Some(id);
        }
        *self.siblings_mut(parent) = beside.into_iter().chain([id]).collect();
        id
    }

    /// Takes a node out; its children become its parent's.
    pub fn remove(&mut self, id: Id) -> Option<T> {
        let Node { parent, children, edge, value, .. } = self.nodes.get_mut(id)?.take()?;
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

    /// Tokens up to a node.
    pub fn len(&self, id: Id) -> usize {
        self.node(id).len
    }

    pub fn parent(&self, id: Id) -> Option<Id> {
        self.node(id).parent
    }

    /// A node's whole sequence.
    pub fn tokens(&self, id: Id) -> Vec<u32> {
        let mut parts = vec![&self.node(id).edge];
        let mut at = id;
        while let Some(parent) = self.node(at).parent {
            parts.push(&self.node(parent).edge);
            at = parent;
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| Some((id, &node.as_ref()?.value)))
    }

    fn siblings(&self, parent: Option<Id>) -> &[Id] {
        parent.map_or(&self.roots, |id| &self.node(id).children)
    }

    fn siblings_mut(&mut self, parent: Option<Id>) -> &mut Vec<Id> {
        match parent {
            Some(id) => &mut self.node_mut(id).children,
            None => &mut self.roots,
        }
    }

    fn node(&self, id: Id) -> &Node<T> {
        self.nodes[id].as_ref().expect("ids of removed nodes are not kept")
    }

    fn node_mut(&mut self, id: Id) -> &mut Node<T> {
        self.nodes[id].as_mut().expect("ids of removed nodes are not kept")
    }
}

impl<T> Index<Id> for Tree<T> {
    type Output = T;

    fn index(&self, id: Id) -> &T {
        &self.node(id).value
    }
}

impl<T> IndexMut<Id> for Tree<T> {
    fn index_mut(&mut self, id: Id) -> &mut T {
        &mut self.node_mut(id).value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_node_comes_between_two_others() {
        let mut tree = Tree::default();
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
        /// Against a map from sequences: what is in, what a prompt begins with, who is whose parent.
        #[test]
        fn it_is_a_map_by_prefix(steps in prop::collection::vec((prop::collection::vec(0u32..3, 1..7), any::<bool>()), 1..60)) {
            let (mut tree, mut map) = (Tree::default(), BTreeMap::new());
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
                    let wanted: Vec<Id> = (1..=ids.len()).filter_map(|end| Some(map.get(&ids[..end])?.0)).collect();
                    prop_assert_eq!(tree.path(ids), wanted.clone());
                    prop_assert_eq!(tree.parent(*id), wanted.iter().rev().nth(1).copied());
                }
            }
        }
    }
}
