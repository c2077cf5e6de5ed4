//! The shortest list that still fails, as far as a bounded search finds it.

/// Lists that are tried.
const TRIES: usize = 600;

/// Takes away halves, quarters and so on (delta debugging) while what is left fails.
pub(super) fn shrink<T: Clone>(all: &[T], fails: impl Fn(&[T]) -> bool) -> Vec<T> {
    let (mut shortest, mut tries) = (all.to_vec(), 0);
    let mut size = all.len().div_ceil(2);
    while size > 0 && tries < TRIES {
        let mut from = 0;
        while from < shortest.len() && tries < TRIES {
            tries += 1;
            let to = (from + size).min(shortest.len());
            let without = [&shortest[..from], &shortest[to..]].concat();
            if fails(&without) {
                shortest = without;
            } else {
                from = to;
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
    shortest
}

#[test]
fn what_is_left_of_a_list_is_what_fails() {
    let all: Vec<u32> = (0..100).collect();
    let fails = |list: &[u32]| list.contains(&17) && list.contains(&80);
    assert_eq!(shrink(&all, fails), [17, 80]);
}
