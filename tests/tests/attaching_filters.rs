//! What is special about clsact filters: whose qdisc it is, and what else can be in it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use smc_policy::kernel::tc::{self, Done, Side, Way};
use smc_policy_tests::attaching::{World, chain, device, named, qdiscs, run, send};
use smc_policy_tests::{Counting, eventually, needs, netns};

#[test]
fn a_clsact_qdisc_goes_only_if_it_is_ours_and_unused() {
    needs!(Root, Netns, Bpffs);
    netns::in_new_namespace(&[], || {
        let world = World::here(Way::Clsact);
        let lo = device("lo");
        let [ours, foreign] = ["smcpol_a", "foreign"].map(Counting::load);
        let detach_both = || Side::ALL.map(|side| world.detach(&lo, side));

        // Ours goes with the last filter, whichever side that is on.
        for last in Side::ALL {
            for side in Side::ALL {
                assert_eq!(world.attach(&lo, side, &ours), Done::Attached);
            }
            let first = if last == Side::Egress { Side::Ingress } else { Side::Egress };
            assert!(world.detach(&lo, first));
            assert!(qdiscs().contains("clsact"), "{last:?} is in use");
            assert_eq!(chain(&lo, last), named(&["smcpol_a"], Way::Clsact));
            assert!(world.detach(&lo, last));
            assert_eq!(qdiscs(), "");
        }

        // With somebody else's filter in it, it stays, and is not ours any more.
        for (ours_on, theirs_on) in
            [(Side::Egress, Side::Egress), (Side::Egress, Side::Ingress), (Side::Ingress, Side::Egress)]
        {
            world.attach(&lo, ours_on, &ours);
            world.add_filter(&lo, theirs_on, &foreign, "protocol ip pref 3");
            assert!(world.detach(&lo, ours_on));
            assert_eq!(chain(&lo, theirs_on), named(&["foreign"], Way::Clsact));
            run(&format!("tc filter del dev lo {}", theirs_on));
            world.attach(&lo, ours_on, &ours);
            assert!(world.detach(&lo, ours_on));
            assert!(qdiscs().contains("clsact"), "they may count on it");
            run("tc qdisc del dev lo clsact");
        }

        // Somebody else's stays, empty as it is.
        run("tc qdisc add dev lo clsact");
        for side in Side::ALL {
            world.attach(&lo, side, &ours);
        }
        assert_eq!(detach_both(), [true, true]);
        assert_eq!(detach_both(), [false, false]);
        assert!(qdiscs().contains("clsact"));

        // So does one that took the place of ours, filters and all.
        run("tc qdisc del dev lo clsact");
        world.attach(&lo, Side::Egress, &ours);
        run("tc qdisc del dev lo clsact");
        run("tc qdisc add dev lo clsact");
        assert_eq!(world.attach(&lo, Side::Egress, &ours), Done::Attached);
        assert!(world.detach(&lo, Side::Egress));
        assert!(qdiscs().contains("clsact"));
    });
}

#[test]
fn an_ingress_qdisc_is_in_the_way_of_filters() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        let lo = device("lo");
        let [ours, foreign] = ["smcpol_a", "foreign"].map(Counting::load);
        run("tc qdisc add dev lo ingress");
        world.add_filter(&lo, Side::Ingress, &foreign, "protocol all");
        assert_eq!(chain(&lo, Side::Ingress), named(&["foreign"], Way::Clsact));
        assert_eq!(chain(&lo, Side::Egress), []);
        for side in Side::ALL {
            match world.way {
                Way::Tcx => assert_eq!(world.attach(&lo, side, &ours), Done::Attached),
                Way::Clsact => {
                    let error = world.try_attach(&lo, side, &ours).unwrap_err().to_string();
                    for expected in ["device lo", "'ingress'", "tc qdisc del dev lo ingress"] {
                        assert!(error.contains(expected), "{error}");
                    }
                }
            }
            assert_eq!(world.detach(&lo, side), world.way == Way::Tcx);
        }
        assert_eq!(chain(&lo, Side::Ingress), named(&["foreign"], Way::Clsact));
        assert!(qdiscs().contains("ingress"));
    });
}

#[test]
fn filters_of_other_kinds_are_passed_by() {
    needs!(Root, Netns, Bpffs);
    netns::in_new_namespace(&[], || {
        let world = World::here(Way::Clsact);
        let lo = device("lo");
        let [ours, foreign, other] = ["smcpol_a", "foreign", "other"].map(Counting::load);
        run("tc qdisc add dev lo clsact");
        // Priority 1 is for IP only, 2 too: ours, for all packets, cannot be there.
        world.add_filter(&lo, Side::Egress, &foreign, "protocol ip pref 1");
        world.add_filter(&lo, Side::Egress, &other, "protocol ip pref 2");
        let before = run("tc filter show dev lo egress");
        assert_eq!(world.attach(&lo, Side::Egress, &ours), Done::Attached);
        assert_eq!(chain(&lo, Side::Egress), named(&["foreign", "other", "smcpol_a"], Way::Clsact));
        let shown = run("tc filter show dev lo egress");
        assert!(shown.contains("pref 3 bpf") && shown.contains("direct-action"), "{shown}");
        send("lo", 10);
        assert_eq!([&foreign, &other, &ours].map(Counting::count), [10, 10, 10]);
        // Filters that packets meet by a jump only are not part of the chain.
        world.add_filter(&lo, Side::Egress, &other, "chain 5 protocol all pref 1");
        assert_eq!(chain(&lo, Side::Egress).len(), 3);
        run("tc filter del dev lo egress chain 5");
        assert!(world.detach(&lo, Side::Egress));
        assert_eq!(run("tc filter show dev lo egress"), before);

        // Who replaces theirs by priority and handle does not replace ours.
        run("tc filter del dev lo egress");
        world.attach(&lo, Side::Egress, &ours);
        world.add_filter(&lo, Side::Egress, &foreign, "protocol all pref 1 handle 1");
        assert_eq!(chain(&lo, Side::Egress), named(&["foreign", "smcpol_a"], Way::Clsact));
    });
}

#[test]
fn filters_that_are_no_programs_are_listed_by_kind() {
    needs!(Root, Netns, Bpffs, U32);
    netns::in_new_namespace(&[], || {
        let world = World::here(Way::Clsact);
        let lo = device("lo");
        let [ours, foreign] = ["smcpol_a", "foreign"].map(Counting::load);
        run("tc qdisc add dev lo clsact");
        // Two filters of one priority.
        for port in [1, 2] {
            run(&format!("tc filter add dev lo ingress protocol ip pref 1 u32 match ip dport {port} 0xffff"));
        }
        world.add_filter(&lo, Side::Ingress, &foreign, "protocol all pref 3");
        let before = run("tc filter show dev lo ingress");
        assert_eq!(world.attach(&lo, Side::Ingress, &ours), Done::Attached);
        let met = tc::chain(&lo, Side::Ingress).unwrap();
        let met: Vec<_> = met.iter().map(|a| (a.name.as_str(), a.program)).collect();
        assert_eq!(met, [("u32", 0), ("smcpol_a", ours.id()), ("foreign", foreign.id())]);
        send("lo", 10);
        eventually("all are counted", || ours.count() == 10 && foreign.count() == 10);
        assert!(world.detach(&lo, Side::Ingress));
        assert_eq!(run("tc filter show dev lo ingress"), before);
    });
}
