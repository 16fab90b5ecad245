//! A lock-free ordered index: a static directory over a dynamic path-compressed bit trie.
