//! A short form of `make fuzz`: the same first inputs of every target each time.

use ballast_tests::fuzz::Fuzzer;

#[test]
fn no_decoder_panics_and_the_fold_keeps_its_invariants_whatever_comes() {
    let fuzzer = Fuzzer::new();
    for target in &fuzzer.targets {
        let inputs = if target.name == "fold" || target.name == "snapshot" { 60 } else { 1_000 };
        let accepted = (0..inputs).filter(|number| target.feed(&fuzzer.input(target, 1, *number))).count();
        assert!(accepted < inputs as usize || target.name == "fold", "{}: nothing was damaged", target.name);
    }
}

#[test]
fn an_input_follows_from_target_seed_and_number() {
    let (first, second) = (Fuzzer::new(), Fuzzer::new());
    for (one, other) in first.targets.iter().zip(&second.targets) {
        for number in 0..20 {
            assert_eq!(first.input(one, 5, number), second.input(other, 5, number), "{}", one.name);
        }
    }
}
