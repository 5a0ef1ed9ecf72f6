# The first of two virtual machines: the node of the transfer crate's tests.
export BALLAST_RDMA_ROLE=node BALLAST_RDMA_LAB=$LAB_ip BALLAST_RDMA_PORT=7700 RUST_BACKTRACE=1
while read -r folder; do mkdir -p "$folder"; done < /usr/bin/scratch-folders
transfer-tests the_node_of_two_machines
