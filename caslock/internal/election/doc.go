// Package election tests package k8slease with the leader election of client-go. It is a module of
// its own, because to compile all of client-go takes minutes.
package election
