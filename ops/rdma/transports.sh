# In one virtual machine: what every transport has to do, over RDMA, and what only RDMA has to. Everything that these tests ask of
# TCP is asked of RDMA beside TCP, at the address that the emulated device has.
export BALLAST_RDMA_LAB=$LAB_ip RUST_BACKTRACE=1 RUST_TEST_THREADS=1
export BALLAST_NATS_SERVER=/usr/bin/nats-server
while read -r folder; do mkdir -p "$folder"; done < /usr/bin/scratch-folders
transfer-tests protocol_tests one_sided rdma:: || exit 1
data-path-tests getting putting sharing || exit 1
