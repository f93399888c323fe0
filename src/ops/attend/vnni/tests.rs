use super::*;

#[test]
fn every_quad_has_its_place() {
    let mut places: Vec<usize> = (0..QUADS).map(place).collect();
    assert_eq!(places[..5], [0, 4, 1, 5, 2]);
    places.sort_unstable();
    assert!(places.into_iter().eq(0..QUADS));
}
