# The second of two virtual machines: what a transport has to do, asked of the node on the other one.
export BALLAST_RDMA_ROLE=client BALLAST_RDMA_NODE=$LAB_peer BALLAST_RDMA_PORT=7700 RUST_BACKTRACE=1
transfer-tests the_client_of_two_machines
