//! Alone in its process: it counts the descriptors of all of it.

mod common;

use common::{config, node};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn every_descriptor_is_closed_again() {
    let before = descriptors();
    for _ in 0..5 {
        let mut a = node("a", config(), 1 << 20);
        let mut b = node("b", config(), 1 << 20);
        a.meet(&mut b);
        let grant = b.grant(&a.peer, 0, 1 << 20);
        let post = a.post(&b.peer, grant, 0, 0, 0, 1 << 20);
        a.wait_posted(post).unwrap();
        b.transport.disconnect(&a.peer, "and again");
        a.wait_down(&b.peer);
        a.wait_up(&b.peer);
    }
    assert_eq!(descriptors(), before);
}
