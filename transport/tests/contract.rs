//! Every transport runs the whole contract.

use kvferry_transport::{FaultPlan, FaultRates, LoopbackConfig, LoopbackNetwork, Transport};

mod loopback {
    use super::*;

    kvferry_transport::contract_tests!({
        let network = LoopbackNetwork::new();
        move |peer, greeting| -> Box<dyn Transport> {
            Box::new(network.endpoint(peer, greeting, LoopbackConfig::default(), FaultPlan::NONE))
        }
    });
}

mod loopback_with_frames_out_of_order {
    use super::*;

    kvferry_transport::contract_tests!({
        let network = LoopbackNetwork::new();
        move |peer, greeting| -> Box<dyn Transport> {
            let rates = FaultRates { delay: 200_000, ..FaultRates::default() };
            let plan = FaultPlan { seed: 11, rates };
            let config = LoopbackConfig { frame_bytes: 16 << 10, ..LoopbackConfig::default() };
            Box::new(network.endpoint(peer, greeting, config, plan))
        }
    });
}

mod tcp {
    use kvferry_protocol::wire::ClusterKey;
    use kvferry_transport::{Tcp, TcpConfig, TcpConfigFile};

    use super::*;

    kvferry_transport::contract_tests!(|peer, greeting| -> Box<dyn Transport> {
        let file = TcpConfigFile { redial_first_ms: 2, redial_longest_ms: 20, ..TcpConfigFile::default() };
        let config = TcpConfig::try_from(file).unwrap();
        Box::new(Tcp::bind(config, ClusterKey::new(&[7; 32]).unwrap(), peer, greeting).unwrap())
    });
}
